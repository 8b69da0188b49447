"""Runs loops of tools and reads reasoning with the official openai package, on a model that says what stands between
control characters: URL."""

import json
import sys
import time

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
MODEL = client.models.list().data[0].id
CALL = """<think>
The user wants the weather.
</think>

One moment.
<tool_call>
<function=get_weather>
<parameter=city>
Zürich 🏔
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.", "strict": True,
        "parameters": {
            "type": "object", "additionalProperties": False, "required": ["city", "days"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}]


def said(answer):
    return f"\x01{answer}\x02"


def get_weather(city, days):
    assert (city, days) == ("Zürich 🏔", 3)
    return said(f"{days} days of sun in {city}.")


def check_loop():
    messages = [{"role": "user", "content": said(CALL)}]
    turns = 0
    while True:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        [choice] = answer.choices
        messages.append(choice.message)
        turns += 1
        if choice.finish_reason != "tool_calls":
            break
        assert choice.message.content == "One moment."
        assert choice.message.reasoning_content == "The user wants the weather."
        for call in choice.message.tool_calls:
            assert call.type == "function" and call.function.name == "get_weather"
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert turns == 2 and choice.finish_reason == "stop"
    assert choice.message.content == "3 days of sun in Zürich 🏔." and choice.message.tool_calls is None


def check_stream_helper():
    messages = [{"role": "user", "content": said(CALL)}]
    kinds = []
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        for event in stream:
            kinds.append(event.type)
        answer = stream.get_final_completion()
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == {"city": "Zürich 🏔", "days": 3}, call
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    assert kinds.count("tool_calls.function.arguments.done") == 1, kinds
    assert "tool_calls.function.arguments.delta" in kinds and "content.done" in kinds, kinds


def check_reasoning_stream():
    messages = [{"role": "user", "content": said("<think>\nWhy?\n</think>\n\nSo.")}]
    reasoning = content = ""
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == ("Why?", "So.")
    options = dict(max_tokens=4, reasoning_effort="low")
    cut = client.chat.completions.create(model=MODEL, messages=messages, **options)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 4
    assert cut.choices[0].message.content == "" and cut.choices[0].message.reasoning_content


def check_errors():
    def fails(param, message, **options):
        try:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], **options)
        except openai.BadRequestError as error:
            assert error.param == param and message in error.message, error
            return
        raise AssertionError("no error")

    fails("tools[0].function.name", "is missing", tools=[{"type": "function", "function": {}}])
    fails("tools[0].type", "function", tools=[{"type": "custom", "custom": {"name": "f"}}])
    fails("tool_choice", "must be", tools=TOOLS, tool_choice="perhaps")
    fails("reasoning_effort", "must be one of", reasoning_effort="extreme")
    fails("enable_thinking", "true or false", extra_body={"enable_thinking": "no"})


for name, check in list(globals().items()):
    if name.startswith("check_"):
        begin = time.time()
        check()
        print(f"{name}: {time.time() - begin:.2f} s", flush=True)
