"""`minisgl chat`: a conversation in the terminal.

conversation  the messages, and what they cost    screen   answers on a terminal, as Markdown or plain text
command       the user's input lines             prompt   reads them
"""
