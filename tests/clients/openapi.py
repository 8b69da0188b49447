"""Compares servers with the document at their /openapi.json: URL EMBEDDING_URL.

First answers of every kind, also in streams, with their schemas; then whatever schemathesis makes of the document."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

import jsonschema

URL, EMBEDDING_URL = sys.argv[1:3]
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 4}
TEXT = {"prompt": "The capital of France is", "max_tokens": 4}


def ask(method, path, body=None, headers=(), url=URL):
    """Status, headers and text of a response."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(url + path, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as response:
        with response:
            return response.status, response.headers, response.read().decode()


DOCUMENT = json.loads(ask("GET", "/openapi.json")[2])


def resolve(value):
    """What a reference leads to."""
    while isinstance(value, dict) and list(value) == ["$ref"]:
        place = DOCUMENT
        for name in value["$ref"].removeprefix("#/").split("/"):
            place = place[name.replace("~1", "/").replace("~0", "~")]
        value = place
    return value


def validator(schema):
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def of(name):
    return validator({"$ref": f"#/components/schemas/{name}"})


def compare(method, path, status, body=None, template=None, headers=(), url=URL):
    """Asks, and compares the response with what the document says of it."""
    got, received, text = ask(method, path, body, headers, url)
    assert got == status, (path, body, got, text)
    operation = DOCUMENT["paths"][template or path][method.lower()]
    response = resolve(operation["responses"][str(status)])
    for name, header in response.get("headers", {}).items():
        validator(resolve(header)["schema"]).validate(
            int(received[name]) if resolve(header)["schema"].get("type") == "integer" else received[name])
    if status == 304:
        assert "content" not in response and text == ""
        return None
    kind = received["content-type"].split(";")[0]
    schema = response["content"][kind]["schema"]
    value = json.loads(text) if kind == "application/json" else text
    # The schema of a stream is that of each event: schemathesis looks at those.
    if kind != "text/event-stream":
        validator(schema).validate(value)
    return value


def check_the_document():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        # All references lead somewhere.
        list(of(name).iter_errors({}))
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values():
            body = resolve(operation.get("requestBody"))
            for example in (body or {}).get("content", {}).get("application/json", {}).get("examples", {}).values():
                compare("POST", path, 200, example["value"])


def check_answers():
    for options in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2, "temperature": 1}, {"stop": ["capital"]},
                    {"max_completion_tokens": 1}, {"logit_bias": {"0": -1}, "seed": -1, "model": "default_model"}):
        compare_request("ChatCompletionRequest", "/v1/chat/completions", {**CHAT, **options}, "ChatCompletionChunk")
    compare("POST", "/chat/completions", 200, CHAT)
    for options in ({}, {"echo": True}, {"logprobs": 2}, {"logprobs": True}, {"prompt": [[1, 2], "a"], "n": 2},
                    {"prompt": [504, 3575]}, {"best_of": 1, "suffix": ""}):
        compare_request("CompletionRequest", "/v1/completions", {**TEXT, **options}, "CompletionChunk")


def compare_request(request, path, body, chunk):
    of(request).validate(body)
    whole = compare("POST", path, 200, body)
    for stream_options in (None, {"include_usage": True}):
        streamed = {**body, "stream": True, "stream_options": stream_options}
        of(request).validate(streamed)
        events = compare("POST", path, 200, streamed).split("\n\n")
        data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
        assert data[-1] == "[DONE]", data
        chunks = [json.loads(event) for event in data[:-1]]
        for value in chunks:
            of(chunk).validate(value)
        if stream_options:
            assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def check_nulls_are_nothing():
    for name, path, body in [("ChatCompletionRequest", "/v1/chat/completions", CHAT),
                             ("CompletionRequest", "/v1/completions", TEXT)]:
        parts = resolve({"$ref": f"#/components/schemas/{name}"})["allOf"]
        known = {field for part in parts for field in resolve(part)["properties"]}
        required = {field for part in parts for field in resolve(part).get("required", [])}
        nulls = {**dict.fromkeys(known - required), **body}
        of(name).validate(nulls)
        compare("POST", path, 200, nulls)


def check_refusals():
    """What is refused for its form is refused by the schema too."""
    for fields in ({"n": 0}, {"n": 129}, {"max_tokens": 0}, {"temperature": -1}, {"top_p": 2}, {"top_k": -1}, {"min_p": 2},
                   {"stop": ""}, {"stop": [1]}, {"stream": 1}, {"seed": 1.5}, {"logit_bias": {"x": 1}}, {"xtc_threshold": 1},
                   {"logit_bias": [1]}, {"repetition_penalty": -1}, {"model": 5}, {"min_tokens_to_keep": 0},
                   {"repetition_context_size": -1}, {"stream_options": 1}, {"stop": ["x"] * 65}, {"guided_choice": [1]},
                   {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
                   {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, {"guided_regex": 1},
                   {"structured_outputs": {}}, {"structured_outputs": {"json": []}}):
        for name, path, body in [("ChatCompletionRequest", "/v1/chat/completions", CHAT),
                                 ("CompletionRequest", "/v1/completions", TEXT)]:
            assert not of(name).is_valid({**body, **fields}), fields
            compare("POST", path, 400, {**body, **fields})
    for fields in ({"messages": None}, {"messages": 1}, {"messages": [{}]}, {"messages": [{"role": "god"}]},
                   {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"logprobs": 1},
                   {"top_logprobs": 21}, {"chat_template_kwargs": []}, {"tools": [{}]}, {"tool_choice": "perhaps"},
                   {"tools": [{"function": {"name": "a b"}}]}, {"reasoning_effort": "huge"}, {"enable_thinking": 1},
                   {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}):
        assert not of("ChatCompletionRequest").is_valid({**CHAT, **fields}), fields
        compare("POST", "/v1/chat/completions", 400, {**CHAT, **fields})
    for fields in ({"prompt": None}, {"prompt": 1}, {"prompt": [1.5]}, {"prompt": [[-1]]}, {"logprobs": 21},
                   {"prompt": ["a"] * 129}, {"suffix": "x"}, {"echo": 1}):
        assert not of("CompletionRequest").is_valid({**TEXT, **fields}), fields
        compare("POST", "/v1/completions", 400, {**TEXT, **fields})


def check_errors():
    path = "/v1/chat/completions"
    compare("POST", path, 400, b"{")
    compare("POST", path, 404, {**CHAT, "model": "another"})
    compare("POST", path, 415, b"{}", headers={"Content-Type": "text/plain"})
    compare("POST", path, 413, b"[", headers={"Content-Length": str(17 << 20)})
    compare("POST", path, 403, CHAT, headers={"Origin": "https://evil.example"})
    compare("POST", "/v1/completions", 400, {"prompt": "word " * 9000})
    compare("POST", "/v1/embeddings", 400, {"input": "This is no embedding model."})
    compare("GET", "/v1/models/another", 404, template="/v1/models/{id}")


def check_the_rest():
    compare("GET", "/v1/models", 200)
    compare("GET", "/v1/models/default_model", 200, template="/v1/models/{id}")
    for path in ("/health", "/stats", "/metrics", "/version", "/openapi.json", "/"):
        compare("GET", path, 200)
    compare("GET", "/", 304, headers={"If-None-Match": ask("GET", "/")[1]["etag"]})


def check_embeddings():
    for options in ({}, {"encoding_format": "base64", "dimensions": 8}, {"input": [[5, 6], "a"], "input_type": "query"},
                    {"input": [5, 6]}, {"instruction": "Find"}):
        body = {"input": "A text.", **options}
        of("EmbeddingRequest").validate(body)
        compare("POST", "/v1/embeddings", 200, body, url=EMBEDDING_URL)
    for options in ({"input": None}, {"input": []}, {"input": [[]]}, {"input": [1.5]}, {"input": ["a"] * 2049},
                    {"encoding_format": "hex"}, {"input_type": "song"}, {"dimensions": 0}):
        body = {"input": "A text.", **options}
        assert not of("EmbeddingRequest").is_valid(body), options
        compare("POST", "/v1/embeddings", 400, body, url=EMBEDDING_URL)


def check_with_schemathesis():
    """Requests of every form, valid and not: no 5xx, and nothing that the document does not have."""
    attack(URL)
    attack(EMBEDDING_URL, "--include-path", "/v1/embeddings")


def attack(url, *arguments):
    hooks = pathlib.Path(__file__).parent.resolve() / "schemathesis_hooks.py"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--max-examples", "25",
               "--seed", "1", "--no-color", "--phases", "examples,coverage,fuzzing", "--continue-on-failure",
               # What only the model knows (its vocabulary, its context) is not in the document.
               "--exclude-checks", "positive_data_acceptance", *arguments]
    # It leaves files where it runs.
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(command, cwd=folder, env={**os.environ, "SCHEMATHESIS_HOOKS": str(hooks)},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert found.returncode == 0, found.stdout


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, flush=True)
