"""What any HTTP API needs: who may call, bodies and their limits, connections, errors, routes, and running it all."""
