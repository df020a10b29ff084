"""Chats to ids and the tokens of them that are supervised.

parse        a line of JSON to a chat, or the flaw that it has
template     a chat to text, by a Jinja template
spans        where in the text the supervised turns are
ends         the special tokens that end a turn
calls        whether a template renders all of a turn with tool calls
normalized   whether a tokenizer's normalizer joins what is on both sides of a span's end
tokens       text to ids and their places in it; spans to a mask
source       all of it, for one tokenizer and one set of options
"""
