"""The product with faults: programs that wrap its server and its runner from outside."""
