"""Where artifacts live: a directory or an object store, and a node's own copies of what is in one."""
