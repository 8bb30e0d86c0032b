"""The OpenAI protocol, the one-thread engine and the ASGI app: runs under plain uvicorn, wrapped by Serve in deploy."""
