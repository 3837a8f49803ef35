"""The options of the engine, the server and the endpoint, read from command lines and files."""
