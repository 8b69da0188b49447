"""Asks a server for answers of random JSON schemas and checks each with an independent validator: URL COUNT."""

import collections
import concurrent.futures
import json
import random
import sys

import jsonschema
import openai

URL, COUNT = sys.argv[1], int(sys.argv[2])
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
MODEL = client.models.list().data[0].id
NAMES = ["name", "id", "size", "größe", "a b", "x\"y", "tag", "😀"]
PATTERNS = ["^[a-z]{2,6}$", "^(foo|bar)-[0-9]{1,3}$", "[A-Z]", "^\\d{3}$", "x"]
# The fewer tokens, the sooner.
COMPACT = 'Compact JSON, one per line:\n{"a":1}\n{"b":"c","d":[2,null]}\n{"e":{"f":true}}\n'
FORMATS = ["date", "email", "ipv4", "ipv6", "uuid"]


def integer(dice):
    schema, low = {"type": "integer"}, dice.randint(-1000, 1000)
    schema[dice.choice(["minimum", "exclusiveMinimum"])] = low
    schema[dice.choice(["maximum", "exclusiveMaximum"])] = low + dice.randint(2, 5000)
    if dice.random() < 0.2:
        schema = {"type": "integer", "multipleOf": dice.choice([2, 5, 7]), "minimum": 0, "maximum": 1000}
    return schema


def number(dice):
    low = dice.choice([-1, 0, 0.5, -273.15, 1e3])
    return {"type": "number", dice.choice(["minimum", "exclusiveMinimum"]): low,
            dice.choice(["maximum", "exclusiveMaximum"]): low + dice.choice([0.25, 1, 99.5, 1e6])}


def string(dice):
    kind = dice.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": dice.choice(PATTERNS), "maxLength": 20}
    if kind == 1:
        return {"type": "string", "format": dice.choice(FORMATS)}
    low = dice.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + dice.randint(0, 12)}


def value(dice):
    return dice.choice([None, True, False, dice.randint(-9, 9), 1.5, "a", "ß\n", "say \"hi\"", [], [1, "x"], {"k": 1}])


def enumeration(dice):
    return {"enum": [value(dice) for _ in range(dice.randint(1, 4))]}


def array(dice, depth):
    schema = {"type": "array", "items": schema_of(dice, depth - 1), "maxItems": dice.randint(1, 3)}
    if dice.random() < 0.5:
        schema["minItems"] = dice.randint(0, schema["maxItems"])
    if dice.random() < 0.2:
        schema["prefixItems"] = [schema_of(dice, 0) for _ in range(schema["maxItems"])]
    return schema


def mapping(dice, depth):
    names = dice.sample(NAMES, dice.randint(0, 3))
    schema = {"type": "object", "properties": {name: schema_of(dice, depth - 1) for name in names},
              "required": [name for name in names if dice.random() < 0.6]}
    kind = dice.randrange(12)
    # Else the model adds properties that no schema limits.
    if kind:
        schema["additionalProperties"] = False
    if kind == 1:
        schema["required"] = names
    if kind == 2:
        schema["patternProperties"] = {"^n[0-9]$": schema_of(dice, 0)}
    return schema


def schema_of(dice, depth=2):
    simple = [integer, number, string, string, enumeration, lambda dice: {"const": value(dice)},
              lambda dice: {"type": dice.choice(["boolean", "null"])},
              lambda dice: {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 99},
              lambda dice: {"$ref": f"#/$defs/{dice.choice(['leaf', 'pair'])}"}]
    if depth <= 0 or dice.random() < 0.3:
        return dice.choice(simple)(dice)
    kind = dice.randrange(6)
    if kind < 3:
        return mapping(dice, depth)
    if kind == 3:
        return array(dice, depth)
    if kind == 4:
        return {"anyOf": [schema_of(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    return {"allOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": dice.randint(1, 9)}]}


def root(seed):
    dice = random.Random(seed)
    schema = mapping(dice, 3) if dice.random() < 0.7 else schema_of(dice, 3)
    schema["$defs"] = {
        "leaf": {"type": "integer", "minimum": 1, "maximum": 6},
        "pair": {"type": "object", "additionalProperties": False, "required": ["left"],
                 "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"anyOf": [
                     {"type": "null"}, {"$ref": "#/$defs/leaf"}]}}},
    }
    return schema


def ask(seed):
    schema = root(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    options = {"model": MODEL, "max_tokens": 120, "temperature": 1, "seed": seed}
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}
    try:
        if seed % 2:
            messages = [{"role": "user", "content": COMPACT}]
            [choice] = client.chat.completions.create(messages=messages, response_format=form, **options).choices
            text = choice.message.content
        else:
            extra = {"structured_outputs": {"json": schema}}
            [choice] = client.completions.create(prompt=COMPACT, extra_body=extra, **options).choices
            text = choice.text
    except openai.BadRequestError as error:
        return f"refused: {error.message} for {json.dumps(schema)}"
    if choice.finish_reason == "length":
        return "cut"
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"wrong: {text!r} of {json.dumps(schema)}: {error}"
    return "valid"


with concurrent.futures.ThreadPoolExecutor(8) as pool:
    outcomes = list(pool.map(ask, range(COUNT)))
kinds = collections.Counter(outcome.split(":")[0] for outcome in outcomes)
print("\n".join(outcome for outcome in outcomes if ":" in outcome))
print(json.dumps(kinds))
assert kinds["wrong"] == kinds["refused"] == 0
assert kinds["valid"] >= 0.8 * COUNT, kinds
