"""OpenAI's Responses API (``/v1/responses``): its bodies become chats, and the parts of an answer become items.

    body.py      read a body                          output.py       items of an answer, and events about them
    tools.py     tools and the choice between them    work.py         one request, whole or as a stream
    items.py     items of the input -> messages       background.py   a response whose request was answered
    history.py   items of earlier responses           routes.py, socket.py

Responses are kept by ``server/response_store.py``.
"""
