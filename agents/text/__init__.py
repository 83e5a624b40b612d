"""Text in and out: chats to tokens, replies to values, and who said what."""
