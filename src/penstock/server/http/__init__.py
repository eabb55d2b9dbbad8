"""What any HTTP API needs: access control, body limits, connections, errors, routes, and the server's run loop."""
