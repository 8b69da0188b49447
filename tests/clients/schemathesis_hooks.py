"""Keeps the requests that schemathesis makes small (few tokens, few answers), and has them name the model there is.

What is out of range stays so.
"""

import schemathesis

LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}
MOST = {"n": 128}


@schemathesis.hook
def before_call(context, case, kwargs):
    if isinstance(case.body, dict):
        for name, limit in LIMITS.items():
            value = case.body.get(name)
            if isinstance(value, int) and limit < value <= MOST.get(name, value):
                case.body[name] = limit
        # Any other is refused before anything else is looked at.
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "default_model"
