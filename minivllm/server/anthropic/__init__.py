"""Anthropic's Messages API: its bodies become chats of ``server.openai``, and the parts of an answer its blocks.

body ──translate──► values of ChatBody ──Chat──► parts ──Blocks──► events, or one message
"""
