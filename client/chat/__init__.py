"""`minisgl chat`: a conversation in the terminal.

conversation  what was said, and what it cost    screen   answers on a terminal, as Markdown, or as plain text
command       the lines that are typed           prompt   how they are read
"""
