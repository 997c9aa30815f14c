"""How weight bytes travel between hosts: plain sockets and threads, one server per host."""
