"""Tasks for everyday tools: weather, clock, calculator, lists, messages and the like.

Their names and parameters vary, so that the model has to read the definitions.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.tools.demo_chat.tasks import Call, Schema, Task, function
from tests.tools.demo_chat.values import Values, listed

SKIES = listed("sunny,cloudy,rainy,windy,snowy,foggy,clear,stormy,warm,cold,dry,humid")
LANGUAGES = listed("French,German,Spanish,Italian,Dutch,Polish,Greek,Turkish,Hindi,Welsh")
ROOMS = listed("kitchen,bedroom,bathroom,garage,hall,office,cellar,attic,living room,garden")
OPERATIONS = (("plus", "+"), ("minus", "-"), ("times", "*"), ("divided by", "/"))


def text(values: Values, *descriptions: str, enum: list[str] | None = None) -> Schema:
    """Return the schema of a string, with a description or without."""
    schema: Schema = {"type": "string"}
    if enum is not None:
        schema["enum"] = enum
    if values.chance(0.3):
        schema["description"] = _one_of(values, descriptions)
    return schema


def described(values: Values, *descriptions: str) -> str:
    return "" if values.chance(0.15) else _one_of(values, descriptions)


def _one_of(values: Values, descriptions: tuple[str, ...]) -> str:
    """Return a description, now and then one that means nothing."""
    if values.chance(0.15):
        return f"{values.words(values.number(2, 8)).capitalize()}."
    return values.pick(descriptions)


def result_of(values: Values, fields: Mapping[str, Any]) -> str:
    """Return a result as JSON, its fields in any order."""
    items = list(fields.items())
    values.random.shuffle(items)
    return json.dumps(dict(items), ensure_ascii=False)


def weather_tool(values: Values) -> tuple[Schema, str, bool]:
    """Return a weather tool, the name of its parameter, and whether it has units."""
    stems = ("get_weather", "weather", "current_weather", "get_current_weather", "check_weather")
    name = values.pick((*stems, "lookup_weather", "weather_now", "get_forecast", "fetch_weather"))
    key = values.pick(("city", "city", "location", "place", "town"))
    properties = {key: text(values, "Name of the city", "The city", "Where", "City name")}
    has_unit = values.chance(0.3)
    if has_unit:
        units = ["celsius", "fahrenheit"]
        properties["unit"] = text(values, "Unit of the temperature", "The unit", enum=units)
    summary = described(values, "Get the current weather", "Weather of a city", "Look up weather")
    return function(name, summary, properties, [key]), key, has_unit


def weather_call(
    values: Values, tool: Schema, key: str, city: str, unit: str | None
) -> tuple[Call, str]:
    """Return a call for one city, and what the result states about it."""
    degrees, sky = values.number(-9, 38), values.pick(SKIES)
    fields: dict[str, Any] = {
        values.pick(("temperature", "temp", "degrees", "temp_c")): degrees,
        values.pick(("condition", "sky", "weather", "summary")): sky,
    }
    if values.chance(0.2):
        fields[values.pick(("city", "location"))] = city
    if values.chance(0.15):
        fields["humidity"] = values.number(20, 99)
    arguments = {key: city} | ({} if unit is None else {"unit": unit})
    result = result_of(values, fields)
    if values.chance(0.2):
        result = values.pick((f"{degrees} degrees, {sky}", f"{sky}, {degrees} degrees"))
    return Call(
        tool["function"]["name"], arguments, result
    ), f"{degrees} degrees and {sky} in {city}"


def weather(values: Values) -> Task:
    tool, key, has_unit = weather_tool(values)
    city = values.city()
    unit = values.pick(("celsius", "fahrenheit")) if has_unit and values.chance(0.6) else None
    forms = (
        "What is the weather in {}?|What's the weather in {}?|How is the weather in {}?|"
        "How's the weather in {} today?|What is the weather like in {}?|Is it raining in {}?|"
        "Weather in {}|Weather for {} please|Give me the weather in {}.|How warm is it in {}?|"
        "Is it cold in {}?|I am going to {}. What is the weather there?|Check the weather in {}.|"
        "Do I need an umbrella in {}?|what's the weather in {}|Please show me the weather for {}.|"
        "Hello! How is the weather in {}?|What is the temperature in {}?|Will it rain in {} today?"
    )
    question = values.form(forms).format(city)
    if unit is not None:
        unit_forms = (f"{question} In {unit}, please.", f"{question} Use {unit}.")
        question = values.pick(unit_forms)
    call, stated = weather_call(values, tool, key, city, unit)
    return Task(question, [tool], [call], f"It is {stated}.", topic="weather")


def weather_of_two(values: Values) -> Task:
    tool, key, _ = weather_tool(values)
    cities = [values.city(), values.city()]
    forms = (
        "What is the weather in {} and {}?|How is the weather in {} and in {}?|"
        "Compare the weather in {} and {}.|Weather in {} and {} please|"
        "Is it warmer in {} or in {}?|Give me the weather for {} and {}."
    )
    made = [weather_call(values, tool, key, city, None) for city in cities]
    answer = f"It is {made[0][1]}, and {made[1][1]}."
    question = values.form(forms).format(*cities)
    return Task(question, [tool], [call for call, _ in made], answer, topic="weather")


def clock(values: Values) -> Task:
    name = values.pick(("get_time", "current_time", "time_now", "get_current_time", "clock"))
    now = values.time()
    fields = {values.pick(("time", "now", "local_time")): now}
    result = now if values.chance(0.2) else result_of(values, fields)
    summary = described(values, "Get the current time", "The time now", "Current local time")
    if values.chance(0.4):
        forms = "What time is it?|What's the time?|Give me the time.|What is the time now?|Time?"
        question = values.form(forms)
        tool = function(name, summary, {}, [])
        return Task(question, [tool], [Call(name, {}, result)], f"It is {now}.", topic="time")
    city, key = values.city(), values.pick(("city", "location", "place", "timezone"))
    forms = (
        "What time is it in {}?|What's the time in {}?|Give me the time in {}.|Time in {} please|"
        "How late is it in {}?|What is the local time in {}?|I am in {}. What time is it?"
    )
    question = values.form(forms).format(city)
    tool = function(name, summary, {key: text(values, "The city", "Where")}, [key])
    call = Call(name, {key: city}, result)
    return Task(question, [tool], [call], f"It is {now} in {city}.", topic="time")


def calculator(values: Values) -> Task:
    word, sign = values.pick(OPERATIONS)
    high = values.pick((9, 99, 999, 9999))
    a, b = values.number(1, high), values.number(1, high)
    value: Any = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[sign]
    forms = "What is {}?|How much is {}?|Calculate {}.|Compute {}|{}|Please work out {}.|What's {}?"
    spoken = values.pick((f"{a} {word} {b}", f"{a} {sign} {b}", f"{a}{sign}{b}"))
    question = values.form(forms).format(spoken)
    result = result_of(values, {values.pick(("result", "value", "answer")): value})
    if values.chance(0.3):
        result = str(value)
    answer = f"{a} {word} {b} is {value}."
    if values.chance(0.6):
        name = values.pick(("calculator", "calculate", "calc", "evaluate", "compute", "math"))
        key = values.pick(("expression", "expression", "expr", "formula", "input"))
        summary = described(values, "Evaluate an expression", "A calculator", "Do arithmetic")
        tool = function(
            name, summary, {key: text(values, "The expression", "What to compute")}, [key]
        )
        arguments: dict[str, Any] = {key: f"{a} {sign} {b}"}
    else:
        stem = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[sign]
        name = values.pick((stem, f"{stem}_numbers"))
        first, second = values.pick((("a", "b"), ("x", "y"), ("first", "second")))
        kind = values.pick(("number", "integer"))
        properties = {key: {"type": kind} for key in (first, second)}
        tool = function(
            name, described(values, f"{stem.capitalize()} two numbers"), properties, [*properties]
        )
        arguments = {first: a, second: b}
    return Task(question, [tool], [Call(name, arguments, result)], answer, topic="arithmetic")


def lists(values: Values) -> Task:
    item = values.item()
    place = values.pick(("shopping", "todo", "packing", "wish", "party", values.word()))
    name = values.pick(("add_to_list", "add_item", "list_add", "append_to_list", "add_entry"))
    item_key = values.pick(("item", "entry", "text", "thing"))
    list_key = values.pick(("list", "list_name", "target"))
    forms = (
        "Put {} on the {} list.|Add {} to my {} list.|Add {} to the {} list please.|"
        "Please put {} on my {} list.|I need {} on the {} list.|Can you add {} to the {} list?|"
        "add {} to the {} list"
    )
    question = values.form(forms).format(item, place)
    properties = {
        item_key: text(values, "What to add", "The item"),
        list_key: text(values, "Name of the list", "Which list"),
    }
    summary = described(values, "Add an item to a list", "Put an item on a list")
    tool = function(name, summary, properties, [*properties])
    result = values.pick(('{"ok": true}', "ok", '{"status": "added"}', '{"success": true}', "done"))
    call = Call(name, {item_key: item, list_key: place}, result)
    return Task(question, [tool], [call], f"I have added {item} to the {place} list.", topic="list")


def reminder(values: Values) -> Task:
    what, when = values.task(), values.time()
    name = values.pick(("set_reminder", "remind", "create_reminder", "add_reminder"))
    what_key = values.pick(("text", "task", "what", "message"))
    when_key = values.pick(("time", "when", "at"))
    forms = (
        "Remind me to {} at {}.|Please remind me to {} at {}.|Set a reminder to {} at {}.|"
        "I must {} at {}. Remind me.|Can you remind me to {} at {}?"
    )
    question = values.form(forms).format(what, when)
    properties = {
        what_key: text(values, "What to remember", "The task"),
        when_key: text(values, "When, as HH:MM", "The time"),
    }
    tool = function(
        name, described(values, "Set a reminder", "Remind the user"), properties, [*properties]
    )
    result = values.pick(('{"ok": true}', "ok", '{"status": "set"}', "done"))
    call = Call(name, {what_key: what, when_key: when}, result)
    answer = f"I will remind you to {what} at {when}."
    return Task(question, [tool], [call], answer, topic="reminder")


def timer(values: Values) -> Task:
    minutes = values.number(1, 90)
    name = values.pick(("set_timer", "start_timer", "timer", "countdown"))
    key = values.pick(("minutes", "duration", "length"))
    forms = (
        "Set a timer for {} minutes.|Start a timer of {} minutes.|Timer {} minutes please|"
        "Wake me up in {} minutes.|Please set a {} minute timer."
    )
    question = values.form(forms).format(minutes)
    tool = function(name, described(values, "Start a timer"), {key: {"type": "integer"}}, [key])
    result = values.pick(('{"ok": true}', "ok", '{"status": "running"}', "started"))
    call = Call(name, {key: minutes}, result)
    return Task(question, [tool], [call], f"The timer runs for {minutes} minutes.", topic="timer")


def message(values: Values) -> Task:
    person, words = values.person(), values.phrase()
    name = values.pick(("send_message", "send_text", "message", "send_mail", "send_email"))
    to_key = values.pick(("to", "recipient", "person", "name"))
    text_key = values.pick(("text", "message", "body", "content"))
    forms = (
        'Send {} the message "{}".|Send {} a message: {}|Write to {}: {}|Message {}: {}|'
        'Please send "{1}" to {0}.|Write "{1}" to {0}.|Let {} know: {}'
    )
    question = values.form(forms).format(person, words)
    properties = {
        to_key: text(values, "Who gets it", "Name of the person"),
        text_key: text(values, "The text", "What to send"),
    }
    tool = function(
        name,
        described(values, "Send a message", "Send a text to a person"),
        properties,
        [*properties],
    )
    result = values.pick(('{"ok": true}', "sent", '{"status": "sent"}', '{"sent": true}'))
    call = Call(name, {to_key: person, text_key: words}, result)
    return Task(question, [tool], [call], f"I have sent the message to {person}.", topic="message")


def translation(values: Values) -> Task:
    words, language, translated = values.phrase(), values.pick(LANGUAGES), values.phrase()
    name = values.pick(("translate", "translate_text", "translation"))
    text_key = values.pick(("text", "phrase", "input"))
    to_key = values.pick(("language", "target_language", "to"))
    forms = (
        'Translate "{}" to {}.|Translate "{}" into {}.|What is "{}" in {}?|'
        'How do I write "{}" in {}?|Please translate {} to {}.'
    )
    question = values.form(forms).format(words, language)
    properties = {
        text_key: text(values, "The text"),
        to_key: text(values, "The language", "Target language"),
    }
    tool = function(name, described(values, "Translate a text"), properties, [*properties])
    fields = {values.pick(("translation", "text", "result")): translated}
    result = translated if values.chance(0.3) else result_of(values, fields)
    call = Call(name, {text_key: words, to_key: language}, result)
    return Task(question, [tool], [call], f"In {language} it is: {translated}", topic="translation")


def light(values: Values) -> Task:
    room, state = values.pick(ROOMS), values.pick(("on", "off"))
    name = values.pick(("set_light", "switch_light", "light", "control_light"))
    room_key = values.pick(("room", "where", "place"))
    state_key = values.pick(("state", "status", "value"))
    forms = (
        "Turn {1} the light in the {0}.|Switch the {} light {}.|Turn the light in the {} {}.|"
        "Please switch {1} the light in the {0}.|Turn the {} light {}."
    )
    question = values.form(forms).format(room, state)
    properties = {
        room_key: text(values, "The room", "Which room"),
        state_key: text(values, "On or off", enum=["on", "off"]),
    }
    tool = function(name, described(values, "Switch a light"), properties, [*properties])
    result = values.pick(('{"ok": true}', "ok", "done", f'{{"light": "{state}"}}'))
    call = Call(name, {room_key: room, state_key: state}, result)
    answer = f"The light in the {room} is {state}."
    return Task(question, [tool], [call], answer, topic="light")


LOOKUPS = (
    ("phone number", "phone", "person", "{} has the phone number {}."),
    ("email address", "email", "person", "{} has the email address {}."),
    ("birthday", "date", "person", "{} has the birthday {}."),
    ("price", "price", "item", "The price of {} is {}."),
    ("population", "population", "city", "The population of {} is {}."),
    ("height", "height", "city", "The height of {} is {}."),
    ("balance", "balance", "person", "The balance of {} is {}."),
    ("stock price", "price", "word", "The stock price of {} is {}."),
)


def lookup(values: Values) -> Task:
    noun, field, kind, answer = values.pick(LOOKUPS)
    drawn: dict[str, Callable[[], str]] = {
        "person": values.person,
        "item": values.item,
        "city": values.city,
        "word": values.name,
    }
    subject = drawn[kind]()
    name = values.pick(("get_{}", "lookup_{}", "find_{}", "{}")).format(noun.replace(" ", "_"))
    key = values.pick((kind if kind != "word" else "company", "name", "query", "of"))
    forms = (
        "What is the {} of {}?|What's the {} of {}?|Give me the {} of {}.|Find the {} of {}.|"
        "Look up the {} of {} please.|I need the {} of {}.|Do you know the {} of {}?"
    )
    question = values.form(forms).format(noun, subject)
    found: Any = values.number(1, 99999)
    if field == "email":
        found = f"{values.word()}@{values.word()}.org"
    elif field == "date":
        found = f"{values.pick(('May', 'June', 'July', 'March'))} {values.number(1, 30)}"
    elif field == "phone":
        found = f"{values.number(100, 999)} {values.number(1000, 9999)}"
    fields = {field: found}
    if values.chance(0.3):
        fields[key] = subject
    result = str(found) if values.chance(0.2) else result_of(values, fields)
    tool = function(
        name,
        described(values, f"Find a {noun}", f"Get the {noun}"),
        {key: text(values, "The name")},
        [key],
    )
    call = Call(name, {key: subject}, result)
    return Task(question, [tool], [call], answer.format(subject, found), topic=noun)


KNOWN = (
    *(
        weather,
        weather,
        weather,
        weather,
        weather,
        clock,
        calculator,
        calculator,
        lists,
        reminder,
        timer,
        message,
    ),
    *(translation, light, lookup, lookup),
)


def known_task(values: Values) -> Task:
    return values.pick(KNOWN)(values)
