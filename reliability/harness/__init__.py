"""What the rows share: servers, clients, requests, processes, and the definition of a row."""
