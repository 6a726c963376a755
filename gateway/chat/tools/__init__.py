"""Functions that models may call. The life of a tool call, in the order of the modules:

1. ``functions`` turns the request's ``tools`` and ``tool_choice`` into a ``ToolChoice``, or answers 400 naming the field.
2. ``formats/families`` finds out from the model's chat template how the model writes calls.
3. ``messages`` brings the conversation into the template's shape. It describes the tools in words if the template shows none.
4. ``call_grammar`` makes a grammar (an xgrammar structural tag) that travels to the workers, so that no call can be malformed.
5. The answer's text comes back in pieces. ``parser`` passes content on and holds back what may be the beginning of a call.
6. ``formats/`` has one generator per format, which reads calls from a ``reader``.
7. ``calls``: the id and name of a call go out when its arguments begin. Then the arguments follow as JSON text, piece by piece.
8. Text that looks like a call but is none becomes content. No text is lost, and no answer fails because of it.
9. The client runs the function and sends its result with the next request, as a message of role ``tool``: back to step 3.
10. ``kvrelay.gateway.chat.dialect`` combines all of this with the model's thoughts.
"""
