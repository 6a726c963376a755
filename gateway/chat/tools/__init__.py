"""Functions that models may call. The life of a tool call, in the order of the modules:

1. ``functions``: the request's ``tools`` and ``tool_choice`` become a ``ToolChoice``, or a 400 that names the field.
2. ``formats/families``: the model's chat template says how it writes calls.
3. ``messages``: the conversation in the template's shape; tools in words if the template shows none.
4. ``call_grammar``: a grammar (an xgrammar structural tag) that travels to the workers: no call can be malformed.
5. The answer's text comes back in pieces. ``parser`` lets content through and holds back what may be the beginning of a call.
6. ``formats/``: how calls are written, read by generators over a ``reader``.
7. ``calls``: an id and the name go out when a call's arguments begin, then the arguments, as they come, as JSON text.
8. What looks like a call and is none is content. No text is lost, and no answer fails because of it.
9. The client runs the function and sends its result with the next request, as a message of role ``tool``: back to 3.
10. ``kvrelay.gateway.chat.dialect`` holds all of it together, with the model's thoughts.
"""
