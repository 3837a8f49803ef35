"""Model folders and architectures: what config.json means, and the modules it builds."""
