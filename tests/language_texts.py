"""Made-up text of several languages: random sentences of a few dozen words each."""

# ruff: noqa: RUF001  (look-alike characters of other scripts)
import random

LANGUAGES = {
    "german": "Die Äpfel sind schön über Köln und groß Straße Mädchen für Übung heiß können "
    "Bäume Häuser München weiß Füße zwölf Öl Käse Tür Gemüse fröhlich natürlich später",
    "turkish": "İstanbul ışık İNCİ okul çiçek Irmak göl büyük ırmağı İzmir güzel kış şiir üzüm dağ "
    "Iğdır yaşlı öğün İlk sarı kapı gözlük",
    "chinese": "今天 天气 很好 我们 一起 去 公园 他 问 你 叫 什么 名字 会议 在 上海 举行 喜欢 吃 "
    "苹果 香蕉 请问 现在 几点 昨天 下雨 所以 没有 出去 学习 语言 模型 需要 很多 文字",
    "japanese": "これ は ペン です 彼 が 言った 日本語 の 文章 を 読む 学校 へ 行きます 東京 で "
    "パン ギター ガラス ぶどう テレビ バス ピアノ 雨 降り そう 今日 とても 楽しかった",
    "thai": "ภาษา ไทย เป็น ที่ มี วรรณยุกต์ ประเทศ น้ำ ดื่ม สะอาด วันนี้ อากาศ ดี มาก เรา ไป โรงเรียน "
    "ด้วยกัน หนังสือ เล่ม นี้ สนุก แมว กิน ปลา",
    "arabic": "السلام عليكم أهلا وسهلا كتاب مدرسة اليوم الطقس جميل ذهب الولد إلى البيت قرأ "
    "مُحَمَّد رسالة مؤمن شيء آخر سؤال هذه اللغة العربية مئة",
    "hindi": "हिन्दी में लिखा गया यह वाक्य है आज मौसम बहुत अच्छा हम साथ विद्यालय जाते क़ानून "
    "ज़रूर लड़का किताब पढ़ता भारत देश की राजधानी दिल्ली",
    "korean": "한국어 문장 오늘 날씨 좋다 우리 함께 공원 가자 그는 이름 무엇 물었다 학교 책 읽는다 "
    "서울 비 내렸다 사과 바나나 좋아한다 많은 언어 모델",
}
_WITHOUT_SPACES = ("chinese", "japanese", "thai")
_ENDS = {"chinese": "。", "japanese": "。", "thai": " ", "hindi": "।"}


def make_texts(language: str, count: int) -> list[str]:
    """Returns `count` documents of one to three sentences each."""
    rng = random.Random(language)
    words = LANGUAGES[language].split()
    space = "" if language in _WITHOUT_SPACES else " "

    def sentence() -> str:
        return space.join(rng.choices(words, k=rng.randint(4, 12))) + _ENDS.get(language, ".")

    return [" ".join(sentence() for _ in range(rng.randint(1, 3))) for _ in range(count)]
