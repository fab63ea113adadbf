"""Tests of reading answers: the last box, equal and different formulas, programs in their fences.

Each answer is one that a model might write, with the verdict that a careful reader gives. Bounded
time is tested with texts made to take long: deep nesting, towers of powers, a hundred thousand
characters.

Left out: running programs (test_sandbox.py).

    python -m pytest test_answers.py          # about fifteen seconds
"""

import subprocess
import sys
import threading
import time

import pytest

import answers
import sandbox

# Gold answer :: right answers to it, or wrong ones, parted by ;;
RIGHT = r"""
18 :: 18.0 ;; 18\text{ m}^2 ;; \frac{36}{2} ;; \sqrt{324} ;; 18 eggs ;; \$18 per day
18 :: 18 dollars per day ;; 18 m/s ;; 18\text{ m/s} ;; 18\ km ;; 18km ;; 18\text{kg}
18 :: \mathbf{18\text{ eggs}} ;; \textbf{18} ;; {18} ;; (18) ;; 3+15=18 ;; x=18
18 :: x = 18\text{ eggs} ;; \text{Answer: }18 ;; \text{The answer is }18 ;; The answer is 18.
18 :: 18. ;; +18 ;; 18 = 18 ;; \$18 ;; 18\$ ;; US\$18 ;; 18\,\mathrm{USD} ;; 18 USD
18 :: \text{Rs. }18 ;; 18 hours ;; 18\text{ sq. ft.} ;; 18\text{ square feet}
18 :: 18 \text{ cubic units} ;; 18^{\circ}\text{C}
5600000 :: 5.6\times 10^6 ;; 5.6 million ;; 5.6\cdot 10^{6} ;; 5.6\text{ million dollars}
12 :: \sqrt{144}
120 :: 5!
1250 :: 1,250 ;; 1{,}250 ;; 1\,250 ;; 1 250 ;; 1250.00
1234567 :: 1,234,567
-5/2 :: -2\frac{1}{2} ;; -2.5 ;; -\frac{5}{2} ;; \frac{-5}{2}
3/2 :: 1 1/2 ;; 1\ 1/2 ;; 1\tfrac12 ;; 1 \frac{1}{2}\text{ hours} ;; 1.5 ;; 3/2 ;; {3}/{2} ;; 1½
\frac{1250}{3} :: \frac{1,250}{3} ;; \frac{1{,}250}{3} ;; 1,250/3
\frac12 :: \frac{1}2 ;; \frac1{2} ;; 0.50 ;; .5 ;; 2^{-1} ;; \left(\frac12\right) ;; \tfrac{1}{2}
-\frac{1}{2} :: \frac{1}{-2} ;; -.5
\frac{1}{3} :: \frac{2}{6}
2\sqrt{5} :: \sqrt{20} ;; 2\cdot\sqrt{5} ;; 2\sqrt5 ;; 2√5 ;; \sqrt{5}\cdot 2
\frac{\sqrt{3}}{3} :: \frac{1}{\sqrt{3}} ;; \frac{\sqrt3}3
52_8 :: 52_{8} ;; (52)_8 ;; 52_8. ;; x = 52_8 ;; 52₈
\text{Evelyn} :: \text{evelyn} ;; \textbf{Evelyn} ;; \textbf{\text{Evelyn}}
\text{(C)} :: \textbf{(C)} ;; (\text{C}) ;; \textbf{C} ;; C. ;; \text{(C) } ;; Option C
\text{(C)} :: \text{Answer: C} ;; \text{C)}
x=5 :: 5 ;; x = 5
5 :: y=5 ;; |{-5}|
(3, \frac{\pi}{2}) :: \left(3,\frac{1}{2}\pi\right) ;; (3, \pi/2) ;; (3,\frac\pi2)
(3, \frac{\pi}{2}) :: (r,\theta)=(3,\pi/2)
(2,4) :: (2, 4) ;; (2.0, 4) ;; (x, y) = (2, 4) ;; \left(2,4\right)
(8,-2) :: (8,−2)
(6,31,-1) :: (6,\ 31,\ -1) ;; \langle 6,31,-1\rangle
(1,-16,-4,43) :: 1,-16,-4,43 ;; (1, -16, -4, 43)
1,-2 :: -2,1 ;; x=1 \text{ or } x=-2 ;; x=1,-2 ;; x \in \{1,-2\} ;; x = -2, x = 1
1,-2 :: 1 \text{ and } -2 ;; 1 and -2 ;; 1;-2 ;; \{-2,1\}
3, 5, 7 :: \{3,5,7\} ;; 3, 5, and 7 ;; 3,5 \text{ and } 7
1 \pm \sqrt{19} :: 1-\sqrt{19},1+\sqrt{19} ;; x=1\pm\sqrt{19}
1 \pm \sqrt{19} :: 1 + \sqrt{19} \text{ and } 1 - \sqrt{19} ;; \{1-\sqrt{19}, 1+\sqrt{19}\}
1 \pm \sqrt{19} :: 1±√19
3 \pm 2 \sqrt{2} :: 3\pm2\sqrt2 ;; 3 \pm \sqrt{8}
\{1\pm\sqrt{5},-2\} :: 1+\sqrt5, 1-\sqrt5, -2 ;; \{-2, 1\pm\sqrt{5}\} ;; -2,1\pm\sqrt5
(-\infty,0] :: x\le 0 ;; x \leq 0 ;; (-\infty, 0] ;; (-∞,0]
(3,4] :: 3 < x \le 4
(-\sqrt{3}, \sqrt{3}) :: -\sqrt3<x<\sqrt3 ;; (-√3, √3)
(0,9) \cup (9,36) :: (0,9)∪(9,36) ;; x \in (0,9) \cup (9,36)
\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right] :: [\pi^2/8, 5\pi^2/4]
x \in [-2,7] :: [-2,7] ;; x\in[-2,7]
y = 2x + 3 :: y=3+2x ;; 2x+3 ;; 2x+3=y ;; y - 2x = 3
y = -2x :: -2x ;; y = -2 x
5x - 7y + 11z + 4 = 0 :: -5x+7y-11z-4=0 ;; 10x-14y+22z+8=0
6 - 5i :: -5i+6
1+2i :: 2i+1
1+274i :: 1 + 274 i
6r^2-4r-24 :: 2(3r^2-2r-12) ;; 6r²−4r−24
8n^2 + 4n + 1 :: 1+4n+8n^2
(a+5)(b+2) :: ab+2a+5b+10
5r^5 :: 5 r^{5}
15x - 80 :: 5(3x-16)
3R^2 :: 3\cdot R^2
2k :: 2 \cdot k ;; k\cdot 2
p - q :: -q+p
\cot x :: \frac{\cos x}{\sin x} ;; \cot\left(x\right)
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} :: \begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}
\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix} :: \begin{bmatrix}-1&0\\0&-1\end{bmatrix}
864 \mbox{ inches}^2 :: 864 ;; 864\text{ in}^2 ;; 864\text{ square inches}
5.4 \text{ cents} :: 5.4 ;; 5.4¢
15\mbox{ cm}^2 :: 15\ \mathrm{cm}^2
\frac{270}7\text{ degrees} :: 270/7
\$18.90 :: 18.90 ;; 18.9
\$36 :: 36\text{ dollars}
11,\! 111,\! 111,\! 100 :: 11,111,111,100
90^\circ :: 90 ;; 90\text{ degrees} ;; \angle ABC = 90^\circ
\frac{\pi}{6} :: 30\cdot\frac{\pi}{180}
\pi :: π
-\frac{\pi}{6} :: -\pi/6
7\pi :: 7 pi
288 \pi :: 288\pi\text{ cm}^3 ;; 288π
18+2\pi :: 2(9+\pi)
\frac{20000}{\pi} :: 20000/\pi
\frac59 :: 5/9
\frac{3840}{289} :: \frac{3840}{289}\text{ sq. units}
2516_8 :: 2516_{8}
4 :: \log_2 16 ;; 4\text{.}
0 :: 0.00
x^5 - x^4 + x^3 - x^2 + x - 1 :: (x-1)(x^4+x^2+1)
6 :: 6 pm ;; 6\text{ p.m.} ;; 6\text{ PM}
1/2 :: ½
(2,\infty) :: (2, +\infty) ;; 2 < x < \infty ;; x \gt 2 ;; 2 < x
(-\infty, 2) \cup (3, \infty) :: (3, \infty) \cup (-\infty, 2)
2,-2 :: \pm 2 ;; ±2
\frac{1}{2} :: 2^{-1} ;; \frac{\frac{1}{1}}{2}
1000 :: 10^3 ;; 10³ ;; 1{,}000\text{ m} ;; 1\text{ thousand}
0.5 :: 1/2 ;; \frac{50}{100}
-3 :: -3.0 ;; - 3 ;; (-3) ;; {-3}
10,000 :: 10^4
\sqrt{2} :: 2^{1/2} ;; \sqrt{2}\text{ cm}
\sqrt{51} :: 51^{\frac12}
x^2+2x+1 :: (x+1)^2
\frac{3}{4} :: 75/100
e :: e
e^2 :: e^{2}
2^{10} :: 1024
\log 2 :: \log(2)
\ln 2 :: \ln(2)
\sin 30 :: \sin(30)
\frac{n(n+1)}{2} :: \frac{n^2+n}{2}
\binom{5}{2} :: 10
\{1,2,3\} :: \{3,2,1\} ;; 1,2,3
[0,1] :: 0 \le x \le 1
\text{yes} :: Yes
\text{no solution} :: \text{No solution}
\text{Monday} :: Monday
"""
WRONG = r"""
18 :: 180 ;; 18x ;; 18-x ;; x-18 ;; 3 ;; 18 or 19 ;; 18, 19 ;; 18 and 19 ;; 1.8 ;; -18 ;; 18.5
18 :: 18 million ;; 18 hundred ;; 18\pi ;; 18^2 ;; 18! ;; \sqrt{18} ;; \frac{18}{7} ;; 10 8
18 :: 10 hours 8 minutes ;; 18 hours 30 minutes ;; 18\text{ hours }30\text{ minutes} ;; 9(9)
18 :: 1 8 ;; 18 dozen ;; \text{not }18 ;; at least 18 ;; \geq 18 ;; x > 18 ;; x \ge 18
18 :: \{18, 19\} ;; (18, 2) ;; 18_{9} ;; 18:30 ;; minus 18 ;; negative 18 ;; 18k
18 :: eighteen thousand ;; - ;; \text{none} ;; \frac{1}{18} ;; 18 - 1 ;; 18+1 ;; 118
3 :: 3x ;; 3 x ;; 5! - 3
144 :: \sqrt{144}
5 :: 5! ;; \pm 5 ;; 5, -5
1/3 :: 0.333333 ;; 0.3333333333 ;; 0.33 ;; 1/3x
52_8 :: 52_9 ;; 52 ;; 25_8 ;; 42 ;; 52_{88}
4210_{5} :: 4210_{6}
3/2 :: 11/2 ;; 1 1/3 ;; 2 1/2
\frac{1250}{3} :: \frac{1,251}{3}
\frac{11}{2} :: 1 1/2
\frac12 :: -\frac12 ;; \frac{1}{2}x ;; \frac{2}{1}
\sqrt{3} :: 1.732 ;; 1.7320508 ;; 3 ;; -\sqrt3
2\sqrt5 :: \pm 2\sqrt5
\pi :: 3.14 ;; 3.14159265 ;; \frac{22}{7} ;; \pi^2 ;; 2\pi ;; p
\text{Evelyn} :: \text{Evenly} ;; \text{Evelyn and Ann} ;; \text{Ann} ;; \text{not Evelyn}
\text{Evelyn} :: Evelyn, Navin
\text{even} :: \text{odd} ;; \text{not even} ;; neve ;; \text{neither even nor odd}
\text{(C)} :: (B) ;; C, D ;; \text{CD} ;; \text{(A)(C)} ;; Option B ;; Option C or D
\text{east} :: \text{west} ;; \text{southeast}
(2,4) :: (4,2) ;; (2,4,6) ;; (2,-4) ;; [2,4] ;; 24
(3,4] :: [3,4) ;; (3,4) ;; 3,4 ;; 3 \le x \le 4
1,-2 :: 1 ;; -2 ;; 1,-2,3 ;; -1,2 ;; 1-2 ;; -1
3, 5, 7 :: 3,5 ;; 3,5,7,9 ;; 357 ;; 3,5,8
(6,31,-1) :: (31,6,-1) ;; (6,31,1)
1 \pm \sqrt{19} :: 1-\sqrt{19} ;; -1\pm\sqrt{19} ;; \pm 1+\sqrt{19}
(-\infty,0] :: (-\infty,0) ;; x<0 ;; x\ge 0
(0,9) \cup (9,36) :: (0,36) ;; (0,9) \cap (9,36)
x \in [-2,7] :: x \in (-2,7) ;; -2 < x < 7
y = 2x + 3 :: y = 2x - 3 ;; y = 3x + 2 ;; x = 2y + 3 ;; 3 ;; 2 ;; y ;; f(x) = 2x - 3
x=5 :: y=5 ;; x=-5 ;; x ;; x=5, x=6 ;; 5x
5x - 7y + 11z + 4 = 0 :: 5x - 7y + 11z + 4 = 1 ;; 5x - 7y + 11z + 4 ;; 0
6 - 5i :: 6+5i ;; 6-5 ;; 6 ;; 5-6i
1+2i :: 1+2
3R^2 :: 3R ;; R^2 ;; 3x^2
2k :: 2 ;; k ;; 2+k ;; k^2 ;; 2k+2
p - q :: p+q ;; p
\cot x :: \tan x ;; \cot ;; \cot y ;; -\cot x ;; x
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} :: \begin{pmatrix} 1/5 & -18/5 \end{pmatrix}
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} :: \begin{pmatrix} -18/5 \\ 1/5 \end{pmatrix}
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} :: \begin{pmatrix} 1/5 \\ 18/5 \end{pmatrix}
\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix} :: -1
(a+5)(b+2) :: (a+2)(b+5) ;; a+5
x^3+3x-6 :: x^3+3x+6
\frac{11+9a}{20} :: \frac{11+9}{20} ;; \frac{11+9b}{20}
10080 :: 10,81 ;; 10, 080 ;; 1008
4 :: 2^2x ;; x^2=4 ;; 10^{10^{10}} ;; 9^{9^{9^{9}}} ;; 2^{99999999} ;; {{{{{{{{ ;; \text{four} ;; 
4 :: \frac{4}{0}
36 :: 36^{\circ} 30'
90^\circ :: \frac{\pi}{2} ;; 91^\circ
0 :: x ;; \emptyset ;; 
1 :: x^0 y
2 :: 2.0.0 ;; 2\text{ and }0
\text{yes} :: no
\text{no solution} :: \text{solution}
(2,\infty) :: x \ge 2 ;; (2,3) ;; 2 ;; \infty
(-\infty, 2) \cup (3, \infty) :: x<2 ;; (2,3)
2,-2 :: 2 ;; 4
\{1,2,3\} :: \{1,2\} ;; (1,2,4)
[0,1] :: 0 < x < 1 ;; 0,1
e :: 2.718
e^2 :: e
\ln 2 :: \log_{10} 2
\frac{n(n+1)}{2} :: \frac{n(n-1)}{2}
1024 :: 10^24
\sqrt{51} :: \sqrt{51.0001} ;; 51
3\sqrt{13} :: 3\sqrt{31} ;; \sqrt{13} ;; 13\sqrt{3}
\frac{14}{3} :: 14/3x ;; 4\frac{1}{3} ;; 4.67 ;; 14, 3
1+274i :: 1+274 ;; 274+i
11,\! 111,\! 111,\! 100 :: 1111111110
5r^5 :: 5r ;; 5^5r
15x - 80 :: 15x ;; 15y - 80
"""


def pairs(table):
    """[(gold, answer)] of a table above."""
    found = []
    for line in table.strip().split("\n"):
        gold, answers_to_it = line.split(" ::", 1)
        found += [(gold, answer.strip(" ")) for answer in answers_to_it.split(";;")]
    return found


def groups(table):
    """{gold: [answer]} of a table above."""
    found = {}
    for gold, answer in pairs(table):
        found.setdefault(gold, []).append(answer)
    return list(found.items())


# ---------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{3}", "3"),
        ("\\boxed{1} then \\boxed{2}.", "2"),
        ("\\boxed {\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\fbox{18}", "18"),
        ("\\boxed{\\sqrt{\\frac{a}{b_{1}}}} and more {}", "\\sqrt{\\frac{a}{b_{1}}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{x : x > 0\\right.}", "\\left\\{x : x > 0\\right."),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{4} but \\boxed{5", "4"),
        ("{ \\boxed{4", None),
        ("} \\boxed{4} }", "4"),
        ("\\boxed{", None),
        ("boxed{3}", None),
        ("3", None),
        ("\\boxed{}", ""),
        ("\\boxed{" * 3000, None),
    ],
)
def test_last_boxed(text, content):
    """The last complete box, with the braces inside it matched."""
    assert answers.boxed(text) == content


@pytest.mark.parametrize("gold, given", groups(RIGHT))
def test_right_formulas(gold, given):
    """Other ways to write the gold answer: all are right."""
    assert [answer for answer in given if not answers.same(answer, gold)] == []


@pytest.mark.parametrize("gold, given", groups(WRONG))
def test_wrong_formulas(gold, given):
    """Near, partial, many and other answers: none is right."""
    assert [answer for answer in given if answers.same(answer, gold)] == []


@pytest.mark.parametrize(
    "text",
    ["{" * 1000, "10^{10^{10}}", "9^{9^{9^9}}", "(10^9)!", "(x+1)^{999}", "2^{99999999}"]
    + ["five " * 199 + "!", '"a" ' * 240 + "x", "1 " * 490, "x" * 100000, "\ud800"],
)
def test_a_verdict_takes_bounded_time(text):
    """What would take minutes, or all memory, is a wrong answer within seconds, and the next
    question is answered all the same."""
    begin = time.process_time(), time.time()
    assert answers.same(text, "4") is False
    assert time.process_time() - begin[0] < 2 and time.time() - begin[1] < 30
    assert answers.same("2 + 2", "4") is True


def test_a_verdict_is_computed_once(monkeypatch):
    """The same answer to the same question is not worked out again."""
    asked = []
    monkeypatch.setattr(answers, "ask", lambda *texts: asked.append(texts) or True)
    assert [answers.same("3 + 1 + 77", "81") for _ in range(3)] == [True] * 3 and len(asked) == 1


def test_threads_may_ask():
    """Verdicts do not need the main thread."""
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(answers.same(f"{n} + {n}", f"{2 * n}")))
        for n in range(100, 108)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_a_missing_library_is_one_sentence(monkeypatch):
    """Without math-verify no verdict is given: one sentence says what to install."""
    answers.worker.cache_clear()
    monkeypatch.setattr(answers.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="pip install -r requirements.txt"):
        answers.same("3 + 100", "103")
    monkeypatch.undo()
    assert answers.same("3 + 100", "103")


def test_the_worker_ends_with_its_caller():
    """The worker process reads questions from a pipe: it ends when the caller is gone."""
    code = "import answers as a\na.same('3 + 4', '7')\nprint(a.worker(a.os.getpid()).pid)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    end = time.time() + 10
    while time.time() < end and alive(int(shown.stdout)):
        time.sleep(0.05)
    assert not alive(int(shown.stdout))


def alive(pid):
    """True if a process with this id runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------------------------------- programs

# In each, {S} stands for the function.
S = "def square(x):\n    return x * x"
FOUND = {
    "close on code": '```python\n{S}```',
    "close+prose": '```python\n{S}```\nDone.',
    "open+code": '```python def square(x): return x * x\n```',
    "open+code multi": '```python {S}\n```',
    "one line all": '```python def square(x): return x * x```',
    "lang none code": '```def square(x): return x*x\n```',
    "title": '```python title="a.py"\n{S}\n```',
    "braces": '```{python}\n{S}\n```',
    "rmd": '```{.python .numberLines}\n{S}\n```',
    "colon": '```python:main.py\n{S}\n```',
    "tilde": '~~~\n{S}\n~~~',
    "tildepy": '~~~ python\n{S}\n~~~~',
    "fence in docstring": '```python\ndef square(x):\n    """Sq.\n\n    ```\n'
    '    square(2)\n    ```\n    """\n    return x * x\n```',
    "pyfence in docstring": '```python\ndef square(x):\n    """Sq.\n    ```python\n'
    '    square(2)\n    ```\n    """\n    return x * x\n```\n'
    'That is it.',
    "empty first": '```\n```\n```python\n{S}\n```',
    "empty python first": '```python\n```\n```python\n{S}\n```',
    "example first": '```\n>>> square(2)\n4\n```\n```python\n{S}\n```',
    "pycon": '```pycon\n>>> square(2)\n4\n```\n```python\n{S}\n```',
    "text first": '```text\nInput: 2\n```\n```python\n{S}\n```',
    "json first": '```json\n{"a": 1}\n```\n```python\n{S}\n```',
    "helper": '```python\ndef mul(a,b):\n    return a*b\n```\nand\n```python\n'
    'def square(x):\n    return mul(x,x)\n```',
    "helper unnamed": '```\ndef mul(a,b):\n    return a*b\n```\nand\n```python\n'
    'def square(x):\n    return mul(x,x)\n```',
    "helper after": '```python\ndef square(x):\n    return mul(x,x)\n```\nand\n'
    '```python\ndef mul(a,b):\n    return a*b\n```',
    "import first": '```python\nimport math\n```\n```python\ndef square(x):\n'
    '    return math.prod([x,x])\n```',
    "from": '```python\nfrom math import prod\n```\n```python\n'
    'def square(x):\n    return prod([x,x])\n```',
    "call first": '```python\nsquare(2)\n```\n```python\n{S}\n```',
    "assign call first": '```python\nr = square(2)\nprint(r)\n```\n```python\n{S}\n```',
    "print call first": '```python\nprint(square(2))\n```\n```python\n{S}\n```',
    "for first": '```python\nfor x in range(3):\n    print(square(x))\n```\n```python\n{S}\n```',
    "assert after": '```python\n{S}\n```\n```python\nassert square(2) == 5\n```',
    "assert in": '```python\n{S}\nassert square(2) == 5\n```',
    "input after": '```python\n{S}\nprint(square(int(input())))\n```',
    "main guard": "```python\n{S}\nif __name__ == '__main__':\n"
    '    print(square(int(input())))\n```',
    "unclosed": '```python\n{S}',
    "unclosed+next": '```python\ndef mul(a,b): return a*b\n```python\n'
    'def square(x): return mul(x,x)\n```',
    "no fence": '{S}',
    "closing alone": '{S}\n```',
    "closing alone prose": '{S}\n```\nThis squares the number.',
    "crlf": '```python\r\ndef square(x):\r\n    return x * x\r\n```',
    "indented": '1. Thus:\n   ```python\n   def square(x):\n       return x * x\n   ```\n2. done',
    "nbsp": '```python\ndef square(x):\n\xa0\xa0\xa0\xa0return x * x\n```',
    "bom": '\ufeff```python\n{S}\n```',
    "upper": '```PYTHON\n{S}\n```',
    "bash after": '```python\n{S}\n```\n```bash\npython a.py\n```',
    "five": '`````python\n{S}\n`````',
    "setrec": '```python\nimport sys\nsys.setrecursionlimit(10**5)\n{S}\n```',
    "table": '```python\nT = {}\nT.update({2: 4, -3: 9})\ndef square(x):\n    return T[x]\n```',
    "class": '```python\nclass S:\n    def f(self, x): return x*x\ns = S()\n'
    'def square(x):\n    return s.f(x)\n```',
    "lambda later": '```python\nsquare = lambda x: mul(x, x)\ndef mul(a, b): return a*b\n```',
    "corrected": '```python\ndef square(x):\n    return x\n```\nNo:\n```python\n{S}\n```',
    "string with fence": "```python\nF = '```'\n{S}\n```",
    "comment fence": '```python\n# not ``` here\n{S}\n```',
    "docstring close on line": '```python\n{S}\n"""end"""```',
    "inline code before": 'Use `square`:\n```python\n{S}\n```',
    "global": '```python\nn = 0\ndef square(x):\n    global n\n    n += 1\n    return x*x\n```',
    "decorator": '```python\nimport functools\n@functools.cache\ndef square(x):\n'
    '    return x*x\nprint(square(2))\n```',
    "semicolon": '```python\nimport math; print(1); n = 2\ndef square(x): return x**n\n```',
    "try import": '```python\ntry:\n    import numpy as np\nexcept ImportError:\n'
    '    np = None\n{S}\n```',
    "future": "```python\n'''Doc.'''\nfrom __future__ import annotations\n{S}\n```",
    "output after": '```python\n{S}\n```\n```\n4\n9\n```',
    "md in md": '````markdown\n```python\n{S}\n```\n````',
    "sample unnamed def later": '```\nsquare(2) == 4\n```\n```\n{S}\n```',
    "spaces after fence": '``` python  \n{S}\n```  ',
    "multi def": '```python\ndef unused(: \n```\n```python\n{S}\n```',
    "apostrophe": "```python\n# It's a square, isn't it?\ndef square(x):\n"
    '    \'\'\'It\'s "the" square.\'\'\'\n    return x * x\n```\n'
    "That's it.",
}  # fmt: skip
NOT_FOUND = {
    "wrong": '```python\ndef square(x):\n    return x + 2\n```',
    "empty": '',
    "prose": 'It is x times x.',
    "call only": '```python\nsquare(2)\n```',
    "assert True": '```python\nassert True\n```',
    "loop": '```python\n{S}\nwhile True: pass\n```',
    "renamed": '```python\ndef sq(x):\n    return x*x\n```',
    "corrected wrongly": '```python\n{S}\n```\nBetter:\n```python\ndef square(x):\n'
    '    return x\n```',
    "other lang": '```javascript\n{S}\n```',
    "print": '```python\nprint(4)\nprint(9)\n```',
    "comment": '```python\n# def square(x):\n```',
    "in text": '```python\ntext = """\n{S}\n"""\n```',
    "always": '```python\nclass A:\n    def __eq__(s,o): return True\n'
    'def square(x): return A()\n```',
}  # fmt: skip
TESTS = sandbox.Tests("", ("square",), "assert square(2) == 4\nassert square(-3) == 9\n")


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_are_found(name):
    """Whatever the fences, examples, helpers and calls around it, the right program is found."""
    program = answers.program(FOUND[name].replace("{S}", S))
    assert sandbox.passes(TESTS, program, seconds=4), program


@pytest.mark.parametrize("name", NOT_FOUND)
def test_programs_that_are_none(name):
    """No program, a wrong one, one of another language or name, one that never ends: not solved."""
    program = answers.program(NOT_FOUND[name].replace("{S}", S))
    assert not sandbox.passes(TESTS, program, seconds=1), program


@pytest.mark.parametrize(
    "text",
    ["```python\n" * 10000, "```\n" * 25000, '"""\n' + "```\n" * 25000, "'" * 100000, "`" * 100000]
    + ["```python\n" + "[" * 100000, "x = (" * 10000, "```python\n" + "'\"#" * 30000, "\ud800"],
)
def test_programs_are_looked_for_in_bounded_time(text):
    """A hundred thousand characters that try the parser end within a second or two."""
    begin = time.process_time()
    answers.program(text)
    answers.boxed(text)
    assert time.process_time() - begin < 3


def test_nothing_is_no_answer():
    """An empty box is not right, not even where the gold is empty or only a unit."""
    for nothing in ("", " ", r"\text{ cm}", "$$"):
        assert not answers.same(nothing, "") and not answers.same("", nothing)


def test_idle_statements_of_several_lines():
    """Each becomes one `pass`; what stands behind it keeps its lines."""
    text = "print(\n    1,\n    2,\n)\ndef f(x):\n    return x\nf(\n    3\n)\ny = 4\n"
    left = "pass\ndef f(x):\n    return x\npass\ny = 4\n"
    assert answers.definitions(text) == left
