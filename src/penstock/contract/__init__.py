"""The vocabulary: frozen values, ports, errors, configuration and limits that every room may import.

Knows no other room; imports the standard library only.
"""
