"""Scripts written without spaces: each question finds the page that answers it among the first five."""

import pytest

from visor.retrieval.bm25 import BM25Retriever
from visor.types import Page, make_page_id

FACTS = [
    ("公司二零二三年营业收入同比增长百分之十二。", "二零二三年营业收入增长了多少？"),
    ("研发投入主要用于人工智能芯片的设计与验证。", "人工智能芯片的研发投入"),
    ("北京总部位于海淀区中关村大街二十七号。", "总部在中关村哪里"),
    ("本报告期内员工总数为三千四百五十人。", "员工总数是多少"),
    ("董事会审议通过了利润分配预案。", "利润分配预案由谁通过"),
    ("存货周转天数由九十天下降到七十五天。", "存货周转天数的变化"),
    ("风险因素包括原材料价格波动和汇率变动。", "原材料价格有什么风险"),
    ("臺灣分公司負責東南亞市場的銷售。", "東南亞市場由哪個分公司負責"),
    ("売上高は前年同期比で五パーセント増加した。", "売上高の増加率"),
    ("研究開発費は主に電池材料に使われた。", "電池材料の研究開発費"),
    ("東京本社の従業員数は千二百名である。", "東京本社の従業員数"),
    ("アンケートの回答者は大学生が最も多い。", "アンケートの回答者"),
    ("図三は都道府県別の人口密度を示す。", "都道府県別の人口密度"),
    ("매출액은 전년 대비 십 퍼센트 증가하였다.", "매출액 증가율"),
    ("설문조사 응답자의 평균 연령은 서른네 살이다.", "응답자의 평균연령"),
    ("서울 본사는 강남구 테헤란로에 위치한다.", "서울본사 위치"),
    ("연구개발비는 배터리 소재에 집중되었다.", "배터리소재 연구개발비"),
    ("รายได้รวมของบริษัทเพิ่มขึ้นร้อยละสิบ", "รายได้รวมของบริษัท"),
    ("จำนวนพนักงานทั้งหมดสองพันคน", "พนักงานทั้งหมดกี่คน"),
    ("第五章 Transformer 模型的注意力机制", "Transformer 注意力机制"),
]
FILLER = [
    "目录 第一章 概述 第二章 方法",
    "附录 参考文献 致谢",
    "目次 はじめに 付録",
    "머리말 목차 부록",
    "Table of contents",
]


@pytest.fixture(scope="module")
def retriever():
    texts = [fact for fact, _ in FACTS] + FILLER * 10
    return BM25Retriever.build(
        [
            Page(
                page_id=make_page_id("d", n),
                doc_id="d",
                page_number=n,
                image="",
                width=1,
                height=1,
                text=text,
            )
            for n, text in enumerate(texts, start=1)
        ]
    )


@pytest.mark.parametrize("number", range(1, len(FACTS) + 1))
def test_hit_at_5(retriever, number):
    hits = retriever.search(FACTS[number - 1][1], 5)
    assert f"d#page={number}" in [hit.page_id for hit in hits]
