"""Tasks for tools that exist nowhere: their names, parameters and values are drawn at random.

The question shares words with the tool that fits, and with the parameters that it needs.
"""

import json
from typing import Any

from tests.tools.demo_chat.known_tools import described, result_of
from tests.tools.demo_chat.tasks import Call, Schema, Task, function
from tests.tools.demo_chat.values import Values, listed

VERBS = listed(
    "find,get,open,close,start,stop,book,order,buy,sell,read,write,delete,create,update,move,copy,"
    "lock,paint,clean,wash,check,count,list,show,print,scan,search,rent,cancel,schedule,plan,fix,"
    "repair,build,load,save,share,archive,mark,rate,play,pause,record,measure,convert,resize,rotate,"
    "sort,filter,merge,split,feed,water,heat,cool,charge,park,deliver,register,track,reserve,run"
)
NOUNS = listed(
    "room,table,ticket,flight,taxi,car,door,lamp,window,file,folder,note,page,book,song,film,photo,"
    "order,invoice,bill,account,parcel,plant,garden,oven,heater,fan,robot,drone,server,cluster,"
    "database,report,meeting,event,hotel,train,bus,bike,boat,house,office,desk,chair,phone,camera,"
    "printer,game,recipe,meal,coffee,pizza,cake,shirt,coat,shop,bank,card,key,map,route,trip,team,"
    "user,job,test,build,backup,image,video,playlist,alarm,sensor,pump,valve,engine,machine,store"
)
PARAMETERS = listed(
    "name,title,date,day,size,colour,color,amount,count,number,id,user,owner,room,floor,seat,price,"
    "limit,level,speed,mode,format,language,country,city,address,street,topic,query,text,subject,"
    "reason,priority,path,key,value,width,height,weight,length,duration,start_date,end_date,"
    "first_name,last_name,user_id,file_name,max_price,max_count,brand,model,type,kind,status,label,"
    "tag,category,area,zone,code,author,artist,genre,year,month,temperature,distance,radius,angle"
)
DAYS = listed("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday")


def _drawn(values: Values, common: list[str], invented: float) -> str:
    return values.word() if values.chance(invented) else values.pick(common)


def value_of(values: Values) -> tuple[Schema, Any, str]:
    """Return the schema of a parameter, a value, and the value in words."""
    kind = values.pick(("string",) * 6 + ("integer",) * 3 + ("number", "boolean", "enum", "array"))
    if kind == "integer":
        number = values.number(0, values.pick((9, 99, 9999)))
        return {"type": values.pick(("integer", "integer", "number"))}, number, str(number)
    if kind == "number":
        decimal = values.number(1, 99) + values.number(1, 9) / 10
        return {"type": "number"}, decimal, str(decimal)
    if kind == "boolean":
        flag = values.chance(0.5)
        return {"type": "boolean"}, flag, str(flag).lower()
    if kind == "enum":
        options = [_drawn(values, ["low", "high", "small", "large", "fast", "slow"], 0.6)]
        while len(options) < 3:
            word = values.word()
            options += [] if word in options else [word]
        chosen = values.pick(options)
        return {"type": "string", "enum": options}, chosen, chosen
    if kind == "array":
        items = [values.item() for _ in range(values.number(2, 3))]
        spoken = ", ".join(items[:-1]) + f" and {items[-1]}"
        return {"type": "array", "items": {"type": "string"}}, items, spoken
    drawn = (
        values.name, values.name, values.word, values.city, values.person, values.item,
        values.time, lambda: values.pick(DAYS), lambda: values.words(2),
        lambda: f"{values.number(2020, 2030)}-{values.number(1, 12):02}-{values.number(1, 28):02}",
        lambda: f"{values.word().upper()[:3]}{values.number(10, 999)}",
        lambda: f"{values.word()}.{values.pick(('txt', 'csv', 'png', 'py'))}",
    )  # fmt: skip
    value = values.pick(drawn)()
    schema: Schema = {"type": "string"}
    return schema, value, f'"{value}"' if values.chance(0.1) else value


def open_tool_words(values: Values) -> tuple[str, str]:
    """Return the verb and the noun of a tool."""
    return _drawn(values, VERBS, 0.1), _drawn(values, NOUNS, 0.3)


def tool_name(values: Values, verb: str, noun: str) -> str:
    forms = "{0}_{1}|{0}_{1}|{0}_{1}|{0}_the_{1}|{1}_{0}|{1}.{0}|{0}-{1}"
    return values.form(forms).format(verb, noun)


def open_task(values: Values) -> Task:
    verb, noun = open_tool_words(values)
    name = tool_name(values, verb, noun)
    keys: list[str] = []
    for _ in range(values.pick((0, 1, 1, 1, 2, 2, 2, 3, 4))):
        key = _drawn(values, PARAMETERS, 0.3)
        keys += [] if key in keys else [key]
    drawn = {key: value_of(values) for key in keys}
    properties = {}
    for key, (schema, _, _) in drawn.items():
        note = {"description": f"The {_words(key)}"} if values.chance(0.2) else {}
        properties[key] = schema | note
    given = [key for key in keys if values.chance(0.9)] or keys[:1]
    required = given if values.chance(0.8) else []
    summaries = (f"{verb.capitalize()} {word} {noun}" for word in ("a", "the", "one"))
    tool = function(name, described(values, *summaries), properties, required)
    question = _question(values, name, verb, noun, {key: drawn[key][2] for key in given})
    result, answer = _result(values, verb, noun)
    call = Call(name, {key: drawn[key][1] for key in given}, result)
    return Task(question, [tool], [call], answer, topic=noun)


def _question(values: Values, name: str, verb: str, noun: str, spoken: dict[str, str]) -> str:
    article = values.pick(("the", "a", "my"))
    starts = (
        f"{verb.capitalize()} {article} {noun}",
        f"Please {verb} {article} {noun}",
        f"Can you {verb} {article} {noun}",
        f"I want to {verb} {article} {noun}",
        f"{verb} {article} {noun}",
        f"Call {name}",
        f"Use {name}",
    )
    start = values.pick(starts)
    end = "?" if start.startswith("Can") else values.pick((".", ".", ""))
    if not spoken:
        return start + end
    keys = list(spoken)
    if values.chance(0.25):
        values.random.shuffle(keys)
    pairs = [(_words(key), spoken[key]) for key in keys]
    if len(pairs) == 1 and values.chance(0.4):
        word = values.pick(("for", "of", "in", "called", "to", "at"))
        return f"{start} {word} {pairs[0][1]}{end}"
    form = values.pick(("with {}", "with {}", "with the {}", "where {}", "colon", "sentences"))
    if form == "colon":
        return f"{start}: " + ", ".join(f"{key} {value}" for key, value in pairs) + "."
    if form == "sentences":
        return f"{start}. " + " ".join(f"The {key} is {value}." for key, value in pairs)
    joint = " is " if form.startswith("where") else " "
    together = " and ".join(f"{key}{joint}{value}" for key, value in pairs)
    return f"{start} {form.format(together)}{end}"


def _words(key: str) -> str:
    return key.replace("_", " ")


def _result(values: Values, verb: str, noun: str) -> tuple[str, str]:
    """Return a result, and the answer that states it."""
    kind = values.pick(("ok", "value", "value", "text", "items", "error"))
    if kind == "ok":
        return values.pick(('{"ok": true}', "ok", '{"status": "ok"}', "done", "{}")), "It is done."
    if kind == "error":
        reason = values.pick((f"{noun} not found", "no connection", values.words(3), "not allowed"))
        result = values.pick(
            (json.dumps({"error": reason}, ensure_ascii=False), f"error: {reason}")
        )
        return result, f"The tool failed: {reason}."
    if kind == "items":
        items = [values.name() for _ in range(values.number(2, 4))]
        answer = f"I found {', '.join(items[:-1])} and {items[-1]}."
        return json.dumps(items, ensure_ascii=False), answer
    value: Any = values.pick(
        (values.name(), values.number(1, 9999), values.words(2), values.time())
    )
    if kind == "text":
        return str(value), f"The result is {value}."
    key = values.pick((noun, "result", "value", _drawn(values, PARAMETERS, 0.3)))
    return result_of(values, {key: value}), f"The {_words(key)} is {value}."
