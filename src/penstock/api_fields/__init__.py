"""The fields of the HTTP APIs: how JSON becomes requests, and the parts of answers that several endpoints share.

Pure parsing and formatting, for the server and for the Python API alike. Knows no HTTP. Invariant: no field is silently
ignored; what is not supported is refused by name.
"""
