"""What clients may send, as pydantic models: types are checked here, values by the server, which names the field.

Unknown fields are refused: a misspelt option that is silently ignored costs more than an error.
"""
