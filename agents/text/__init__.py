"""Text in and out: chats become tokens, replies become values, and each message names the node that wrote it."""
