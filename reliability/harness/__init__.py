"""What the rows share: servers, clients, requests, processes, and what a row is."""
