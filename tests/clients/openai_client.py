"""Uses servers as people do, with the official openai package: URL KEYED_URL KEY EMBEDDING_URL."""

import asyncio
import sys
import time
import typing

import openai
import pydantic

URL, KEYED_URL, KEY, EMBEDDING_URL = sys.argv[1:5]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
MODEL = client.models.list().data[0].id
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def chat(messages=CAPITAL, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def complete(prompt="The capital of France is", **options):
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def fails(kind, call, param, message):
    try:
        call()
    except kind as error:
        assert error.param == param, (error.param, param)
        assert message in error.message, error.message
        assert error.response.headers["x-request-id"]
        return error
    raise AssertionError(f"no {kind.__name__}")


def stats():
    return client.get("/../stats", cast_to=object)


def check_models():
    models = client.models.list().data
    assert [model.id for model in models] == ["SmolLM2-135M-Instruct"]
    assert client.models.retrieve(MODEL) == models[0]
    assert models[0].object == "model" and models[0].created > 1_700_000_000
    error = fails(openai.NotFoundError, lambda: client.models.retrieve("own/er"), None, "own/er")
    assert error.code == "model_not_found"


def check_chat():
    answer = chat(max_tokens=20, temperature=0)
    assert answer.object == "chat.completion" and answer.model == MODEL
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop" and choice.index == 0 and choice.logprobs is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == 8, usage
    short = chat(max_completion_tokens=2, max_tokens=20, temperature=0)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital"},
                                          {"type": "text", "text": " of France?"}]}]
    assert chat(parts, max_tokens=20, temperature=0).choices[0].message.content == choice.message.content


def check_chat_stream():
    whole = chat(max_tokens=20, temperature=0)
    stream = chat(max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id for chunk in chunks)
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}), last
    assert all(part.usage is None for part in parts)
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["stop"]
    plain = list(chat(max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)


def check_completions():
    answer = complete(max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
    text = "".join(chunk.choices[0].text for chunk in complete(max_tokens=8, temperature=0, stream=True))
    assert text == answer.choices[0].text
    tokens = complete([504, 3575, 282, 4649, 314], max_tokens=8, temperature=0)
    assert tokens.choices[0].text == answer.choices[0].text
    several = complete(["The capital of France is", "One, two, three,"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in several.choices]
    assert texts[0] == texts[1] == answer.choices[0].text[: len(texts[0])] and texts[2] == texts[3] != texts[0]
    assert several.usage.completion_tokens == 16
    echo = complete(max_tokens=2, temperature=0, echo=True)
    assert echo.choices[0].text.startswith("The capital of France is Paris")


def check_stop():
    full = chat(max_tokens=20, temperature=0).choices[0].message.content
    for stop, expected in [("Paris", "The capital of France is "), (["zebra", " of", "France"], "The capital")]:
        choice = chat(max_tokens=20, temperature=0, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop"), choice
        chunks = chat(max_tokens=20, temperature=0, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chat(max_tokens=20, temperature=0, stop="zebra").choices[0].message.content == full


def check_n_and_seed():
    story = [{"role": "user", "content": "Tell me a story."}]

    def texts(**options):
        answer = chat(story, temperature=1, max_tokens=12, **options)
        return [choice.message.content for choice in answer.choices]

    first = texts(n=3, seed=7)
    assert len(set(first)) == 3, first
    assert texts(n=3, seed=7) == first and texts(n=1, seed=7) == first[:1]
    assert texts(n=1, seed=8) == first[1:2]
    # Without a seed each request has its own.
    assert len({texts()[0] for _ in range(4)}) > 1
    streamed = ["", "", ""]
    for chunk in chat(story, temperature=1, max_tokens=12, n=3, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == first
    # Greedily there is but one answer.
    assert len(set(chat(story, temperature=0, max_tokens=8, n=2).choices[i].message.content for i in (0, 1))) == 1


def check_sampling_options():
    base = dict(max_tokens=6, temperature=0)
    plain = complete(**base).choices[0].text
    token = complete(logprobs=1, **base).choices[0].logprobs.tokens[0]
    assert token == " Paris"
    # The token of " Paris" can't come any more.
    paris = 7042
    banned = complete(logit_bias={str(paris): -100}, **base).choices[0].text
    assert not banned.startswith(" Paris"), banned
    hot = dict(max_tokens=6, temperature=5, seed=1)
    assert complete(**hot).choices[0].text != plain
    # Whatever the temperature, the likeliest token is left alone.
    for only in [dict(extra_body={"top_k": 1}), dict(top_p=1e-6), dict(extra_body={"min_p": 1.0})]:
        assert complete(**hot, **only).choices[0].text == plain, only
    repeated = complete(max_tokens=40, temperature=0, extra_body={"repetition_penalty": 1.8}).choices[0].text
    assert repeated != complete(max_tokens=40, temperature=0).choices[0].text
    # null is absent, and unknown fields do not matter.
    nulls = dict(top_p=None, n=None, stop=None, seed=None, logit_bias=None, stream=None)
    assert complete(**base, extra_body={"unknown": {"a": [1]}, "top_k": None}, **nulls).choices[0].text == plain


def check_logprobs():
    choice = chat(max_tokens=20, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # Greedy: the token is the likeliest.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
    streamed = []
    for chunk in chat(max_tokens=20, temperature=0, logprobs=True, top_logprobs=3, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == content
    assert chat(max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    stopped = chat(max_tokens=20, temperature=0, logprobs=True, stop=" is").choices[0]
    assert "".join(entry.token for entry in stopped.logprobs.content) == stopped.message.content
    # A rocket, whose bytes are several tokens.
    emoji = complete("🚀🚀🚀🚀🚀🚀", max_tokens=8, temperature=0, logprobs=2).choices[0]
    logprobs = emoji.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    assert len(logprobs.text_offset) == 8 and logprobs.text_offset[0] == 0
    for i, token in enumerate(logprobs.tokens):
        if not token.startswith("bytes:"):
            assert emoji.text[logprobs.text_offset[i]:].startswith(token), (emoji.text, logprobs)


def check_cached_tokens():
    messages = [{"role": "user", "content": "word " * 300 + "What is the capital of France?"}]
    first = chat(messages, max_tokens=4, temperature=0, logit_bias={"2": -100})
    again = chat(messages, max_tokens=4, temperature=0, logit_bias={"2": -100})
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < again.usage.prompt_tokens == first.usage.prompt_tokens
    chunks = list(chat(messages, max_tokens=4, logit_bias={"2": -100}, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached


def check_errors():
    bad = openai.BadRequestError
    fails(bad, lambda: chat(temperature=-1), "temperature", "-1")
    fails(bad, lambda: chat(temperature="hot"), "temperature", "must be a number, but it is a string")
    fails(bad, lambda: chat(top_p=2), "top_p", "2 is not in [0, 1]")
    fails(bad, lambda: chat(max_tokens=0), "max_tokens", "at least 1")
    fails(bad, lambda: chat(n=1000), "n", "from 1 to 128")
    fails(bad, lambda: chat(top_logprobs=2), "top_logprobs", "logprobs")
    fails(bad, lambda: chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20")
    fails(bad, lambda: chat(logit_bias={"999999": 1}), "logit_bias", "999999")
    fails(bad, lambda: chat(extra_body={"top_k": -1}), "top_k", "-1")
    fails(bad, lambda: chat(stop=[1]), "stop[0]", "must be a string")
    fails(bad, lambda: chat([]), "messages", "at least one message")
    fails(bad, lambda: chat([{"role": "king", "content": "x"}]), "messages[0].role", "must be one of")
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    fails(bad, lambda: chat([{"role": "user", "content": image}]), "messages[0].content[0].type", "image_url")
    tool = {"type": "function", "function": {"name": "f"}}
    fails(bad, lambda: chat(tools=[tool]), "tools", "has no place for tools")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    fails(bad, lambda: chat(response_format=form), "response_format.json_schema.schema", "strin")
    fails(bad, lambda: chat(stream_options={"include_usage": True}), "stream_options", "stream is true")
    fails(bad, lambda: complete([1, -1]), "prompt[1]", "-1 is not a token id")
    fails(bad, lambda: complete([999999]), "prompt", "outside the model's vocabulary")
    fails(bad, lambda: complete(""), "prompt", "empty")
    long = fails(bad, lambda: complete("word " * 9000), "prompt", "context of 8192")
    assert long.code == "context_length_exceeded"
    other = lambda: client.chat.completions.create(model="gpt-4", messages=CAPITAL)
    assert fails(openai.NotFoundError, other, "model", "gpt-4").code == "model_not_found"
    images = lambda: client.images.generate(model=MODEL, prompt="x")
    fails(openai.NotFoundError, images, None, "/v1/images/generations")


def check_structured_outputs():
    """The package's own helpers, which send a schema and read the answer back."""
    class Twin(pydantic.BaseModel):
        country: typing.Literal["Italy", "Japan"]

    class Capital(pydantic.BaseModel):
        name: typing.Literal["Paris", "London", "Saint-Étienne"]
        districts: list[typing.Annotated[int, pydantic.Field(ge=1, le=20)]] = pydantic.Field(max_length=3)
        twin: typing.Optional[Twin]

    options = {"model": MODEL, "messages": CAPITAL, "response_format": Capital, "max_tokens": 200, "temperature": 1}
    for seed in range(3):
        [choice] = client.chat.completions.parse(**options, seed=seed).choices
        assert isinstance(choice.message.parsed, Capital), choice
        with client.chat.completions.stream(**options, seed=seed) as stream:
            events = list(stream)
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
        assert any(event.type == "content.done" and event.parsed == choice.message.parsed for event in events)
    extra = {"structured_outputs": {"choice": [" yes", " no"]}}
    assert complete("Is water wet? Answer:", extra_body=extra).choices[0].text in (" yes", " no")


def check_many_streams():
    """32 at once, each as if it were alone."""
    asynchronous = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
    prompts = [f"{i} plus one is" for i in range(32)]

    async def one(prompt):
        stream = await asynchronous.completions.create(
            model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def every():
        return await asyncio.gather(*map(one, prompts))

    together = asyncio.run(every())
    for i in (0, 13, 31):
        assert complete(prompts[i], max_tokens=16, temperature=0).choices[0].text == together[i], i


def check_client_that_leaves():
    def wait(condition, what):
        end = time.time() + 20
        while not condition(stats()):
            assert time.time() < end, (what, stats())
            time.sleep(0.01)

    before = stats()["requests"]
    with complete("Once upon a time", max_tokens=7000, stream=True, logit_bias={"0": -100, "2": -100}) as stream:
        next(iter(stream))
        assert stats()["requests"]["running"] == 1
    wait(lambda now: now["requests"]["running"] == 0, "a stream that was closed")
    impatient = client.with_options(timeout=0.3)
    try:
        impatient.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=7000,
                                     logit_bias={"0": -100, "2": -100})
        raise AssertionError("so soon")
    except openai.APITimeoutError:
        pass
    wait(lambda now: now["requests"]["running"] == 0, "a request without stream that was given up")
    now = stats()
    assert now["requests"]["cancelled"] == before["cancelled"] + 2, (before, now)
    # One step, and what was in flight.
    assert complete(max_tokens=2).choices[0].text


def check_embeddings():
    embedder = openai.OpenAI(base_url=f"{EMBEDDING_URL}/v1", api_key="none", max_retries=0)
    # The package asks for base64 unless it is told otherwise.
    packed = embedder.embeddings.create(model="default_model", input=["one", "another"])
    plain = embedder.embeddings.create(model="default_model", input=["one", "another"], encoding_format="float")
    for a, b in zip(packed.data, plain.data, strict=True):
        assert len(a.embedding) == 64 and a.index == b.index
        assert all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding))
    assert packed.data[0].embedding != packed.data[1].embedding
    assert packed.usage.total_tokens == packed.usage.prompt_tokens > 2
    assert len(embedder.embeddings.create(model="default_model", input="one", dimensions=8).data[0].embedding) == 8
    fails(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="one"), "model",
          "is no embedding model")


def check_key():
    def models(key):
        return openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=key, max_retries=0).models.list()

    assert models(KEY).data[0].id == MODEL
    fails(openai.AuthenticationError, lambda: models(KEY + "x"), None, "the API key is wrong")
    fails(openai.AuthenticationError, lambda: models(KEY[:-1]), None, "the API key is wrong")


for name, check in list(globals().items()):
    if name.startswith("check_"):
        begin = time.time()
        check()
        print(f"{name}: {time.time() - begin:.2f} s", flush=True)
