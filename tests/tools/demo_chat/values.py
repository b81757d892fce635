"""Random values for the slots of a chat, in two splits that share none.

Names and words are mostly made of syllables, so that a model must copy what it reads instead of
remembering it.
"""

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def listed(text: str, separator: str = ",") -> list[str]:
    """Return the parts of a text: shorter to read than a list of literals."""
    return text.split(separator)


CITIES = listed(
    "Paris,Rome,Berlin,Madrid,Lisbon,Vienna,Oslo,Dublin,Athens,Prague,Warsaw,London,Tokyo,Cairo,"
    "Lima,Quito,Delhi,Hanoi,Seoul,Nairobi,Boston,Chicago,Seattle,Denver,Toronto,Sydney,Perth,"
    "Mumbai,Lagos,Accra,Geneva,Zurich,Zürich,Munich,München,Hamburg,Cologne,Milan,Naples,Venice,"
    "Porto,Seville,Lyon,Nice,Bergen,Malmö,Aarhus,Tampere,Riga,Vilnius,Tallinn,Kraków,Brno,Graz,"
    "New York,San Francisco,Los Angeles,Buenos Aires,Cape Town,Mexico City,Hong Kong,São Paulo,"
    "Rio de Janeiro,Kuala Lumpur,Santa Fe,Salt Lake City,Havana,Bogotá,Santiago,Manila,Jakarta,"
    "Bangkok,Dhaka,Karachi,Tehran,Ankara,Istanbul,Moscow,Minsk,Sofia,Belgrade,Zagreb,Skopje"
)
PEOPLE = listed(
    "Anna,Ben,Clara,David,Emma,Felix,Grace,Henry,Ida,Jack,Kate,Leo,Maria,Nina,Oscar,Paul,Rosa,Sam,"
    "Tina,Uma,Victor,Wendy,Yara,Zoe,Alice,Bob,Carol,Dan,Eve,Frank,Gina,Hugo,Ines,Jonas,Karl,Lena,"
    "Mark,Nora,Olga,Peter,Ruth,Simon,Tom,Vera,Walter,Yusuf,Aisha,Chen,Diego,Fatima,Kenji,Ravi"
)
ITEMS = listed(
    "milk,eggs,bread,butter,cheese,apples,bananas,rice,pasta,sugar,salt,coffee,tea,honey,onions,"
    "tomatoes,potatoes,carrots,soap,paper,pens,candles,batteries,flour,oil,vinegar,pepper,garlic,"
    "lemons,oranges,grapes,nuts,beans,corn,juice,water,wine,chocolate,cookies,cereal,yoghurt,ham,"
    "chicken,fish,tofu,socks,shoes,gloves,a hat,a book,a lamp,a rope,green paint,dog food,cat food,"
    "olive oil,orange juice,dark bread,white rice,light bulbs,paper towels,a phone charger"
)
TASKS = listed(
    "call Anna,water the plants,buy stamps,clean the kitchen,pay the rent,feed the cat,"
    "write the report,read the book,book the flight,fix the bike,wash the car,send the letter,"
    "charge the phone,take the medicine,open the window,close the door,check the oven,"
    "walk the dog,meet Ben,pick up the parcel,cook dinner,do the laundry,practice piano,"
    "back up the files,renew the passport,visit the dentist,turn off the heating"
)
PHRASES = listed(
    "see you soon,dinner is ready,I am late,good luck,happy birthday,the train is late,call me,"
    "thank you,meet me at the station,I am at home,the door is open,we need more milk,"
    "the meeting starts now,have a nice day,where are you,it is raining here,lunch at noon,"
    "the parcel is here,good night,good morning,come home,the keys are in the box,all is well"
)
_ONSETS = listed(
    "b,br,bl,c,ch,cl,cr,d,dr,f,fl,fr,g,gl,gr,h,j,k,kl,kr,l,m,n,p,ph,pl,pr,qu,r,s,sc,sh,sk,sl,sm,sn,"
    "sp,st,str,sw,t,th,tr,tw,v,w,wh,x,y,z,zh,"
)
_NUCLEI = listed("a,e,i,o,u,a,e,i,o,u,a,e,i,o,u,ai,au,ea,ee,ei,ia,ie,io,oa,oo,ou,ua,ui,y,y")
_ACCENTED = listed("é,è,ö,ü,ä,å,ó,í,ñ,ç,ø")
_CODAS = listed(
    ",,,,b,ck,d,ft,g,k,l,ld,ll,lt,m,mp,n,nd,ng,nk,nt,p,r,rd,rk,rm,rn,rt,s,sh,ss,st,t,th,v,x,z,ght"
)
_NUM_BUCKETS = 8


def is_held_out(text: str) -> bool:
    """Whether a value is kept from training."""
    return hashlib.sha256(text.lower().encode()).digest()[0] % _NUM_BUCKETS == 0


class Values:
    """Draws values; what `split` and the methods for names return differs between the splits."""

    def __init__(self, random: Random, *, is_held_out: bool) -> None:
        self.random = random
        self._is_held_out = is_held_out

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def form(self, alternatives: str) -> str:
        """Return one of the texts between bars."""
        return self.pick(listed(alternatives, "|"))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def split(self, options: Sequence[str]) -> str:
        """Return one of the options that belong to this split."""
        return self._of_split(lambda: self.pick(options))

    def word(self) -> str:
        """Return an invented word in lower case."""
        return self._of_split(self._invented)

    def name(self) -> str:
        """Return an invented name of one or two words."""
        first = self.word().capitalize()
        return f"{first} {self.word().capitalize()}" if self.chance(0.1) else first

    def city(self) -> str:
        city = self.split(CITIES) if self.chance(0.4) else self.name()
        return f"{city}, {self.word().capitalize()}" if self.chance(0.04) else city

    def person(self) -> str:
        return self.split(PEOPLE) if self.chance(0.4) else self.name()

    def item(self) -> str:
        return self.split(ITEMS) if self.chance(0.5) else self.word()

    def task(self) -> str:
        if self.chance(0.6):
            return self.split(TASKS)
        return f"{self.pick(('call', 'visit', 'ask', 'pay', 'clean', 'find'))} {self.name()}"

    def phrase(self) -> str:
        """Return a short text without quotes or a full stop."""
        return self.split(PHRASES) if self.chance(0.4) else self.words(self.number(1, 5))

    def words(self, count: int) -> str:
        """Return words of every kind, in random order."""
        kinds: tuple[Callable[[], str], ...] = (
            self.word,
            lambda: self.split(ITEMS),
            lambda: self.pick(COMMON_WORDS),
            lambda: self.pick(COMMON_WORDS),
        )
        return " ".join(self.pick(kinds)() for _ in range(count))

    def time(self) -> str:
        return f"{self.number(0, 23)}:{self.number(0, 59):02}"

    def _invented(self) -> str:
        parts = [
            self.pick(_ONSETS) + self.pick(_NUCLEI) + self.pick(_CODAS)
            for _ in range(self.pick((1, 1, 2, 2, 2, 3)))
        ]
        if self.chance(0.03):
            parts.insert(1, self.pick(_ACCENTED))
        return "".join(parts)

    def _of_split(self, draw: Callable[[], str]) -> str:
        for _ in range(1000):
            value = draw()
            if is_held_out(value) == self._is_held_out:
                return value
        raise ValueError("none of the options belongs to this split")


COMMON_WORDS = listed(
    "about,after,again,air,all,also,always,another,answer,area,back,ball,bank,base,bear,beat,best,"
    "big,bird,black,blue,boat,body,bone,both,bottom,brother,brown,build,busy,by,cake,camp,care,"
    "carry,catch,cause,chair,change,child,circle,class,clear,cloud,coast,cold,come,common,complete,"
    "corner,cost,could,cover,cross,crowd,cry,current,cut,dance,dark,deep,desert,design,dinner,"
    "direct,doctor,dream,dress,drink,drive,dry,early,earth,east,easy,edge,energy,engine,enough,"
    "even,evening,ever,every,example,eye,face,fact,fair,fall,family,far,farm,fast,father,few,field,"
    "fight,final,fine,finger,finish,fire,first,floor,flower,fly,follow,food,foot,force,forest,form,"
    "forward,free,fresh,friend,front,fruit,full,game,garden,gentle,girl,give,glad,glass,gold,good,"
    "grand,grass,great,green,ground,group,grow,guess,hair,half,hand,happy,hard,head,heart,heavy,"
    "help,here,high,hill,history,hold,hole,home,hope,horse,hot,hour,house,huge,human,hundred,hurry,"
    "ice,idea,important,inside,interest,island,join,jump,just,keep,key,king,kitchen,know,lake,"
    "language,large,last,late,laugh,law,lead,learn,leave,left,less,letter,level,life,lift,light,"
    "line,little,long,look,love,low,machine,main,make,map,market,master,matter,meal,mean,meat,"
    "middle,might,mile,mind,mine,minute,moment,money,month,moon,more,morning,mother,mountain,mouth,"
    "move,much,music,near,neck,need,never,new,next,night,noise,north,nothing,now,ocean,offer,often,"
    "old,once,open,orange,other,outside,own,page,pair,part,pass,past,path,people,perhaps,person,"
    "picture,piece,pink,place,plain,plan,plane,planet,play,poor,power,present,pretty,problem,"
    "public,pull,purple,push,quick,quiet,quite,race,rain,ready,real,red,rest,rich,ride,right,ring,"
    "river,road,rock,room,round,rule,run,safe,sand,school,sea,season,second,see,sentence,seven,"
    "shape,short,side,silver,simple,sing,sister,size,sky,sleep,slow,small,snow,soft,soil,some,son,"
    "song,sound,south,space,special,spring,square,stage,star,station,stay,steel,step,stone,story,"
    "street,strong,student,study,summer,sun,sure,surface,sweet,swim,system,table,tall,teacher,team,"
    "test,thank,thing,think,third,those,thousand,three,through,today,together,tomorrow,tonight,"
    "top,total,touch,town,toy,train,tree,true,try,turn,under,until,up,use,valley,very,village,"
    "visit,voice,wait,walk,wall,warm,watch,water,wave,way,weather,week,west,wheel,while,white,why,"
    "wide,wild,wind,winter,wish,woman,wonder,wood,word,work,world,write,year,yellow,yes,young"
)
