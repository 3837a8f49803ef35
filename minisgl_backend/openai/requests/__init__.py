"""Requests as pydantic models: types are checked here, values by the server, whose errors name the field.

Unknown fields are errors: silently ignoring a misspelt option would cost more than an error.
"""
