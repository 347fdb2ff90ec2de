"""Ollama's API: chats, generation from a prompt, and the list of models, for clients of Ollama.

body ──bodies──► ChatBody or CompletionBody ──► openai.chat.Chat or openai.completions.Completion
                                                      └ answers.Lines: a line of JSON for each piece of text
"""
