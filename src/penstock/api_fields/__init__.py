"""The fields of the HTTP APIs: how JSON becomes requests, and the parts of answers that several endpoints share.

Pure parsing and formatting, for both the server and the Python API. Knows no HTTP. Invariant: no field is silently
ignored; an unsupported one is refused by name.
"""
