"""Renders a check as JUnit XML, which CI systems show as a table of tests."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from e2e_registry.comparison import Assessment, TestVerdict
from e2e_registry.reports.console import assessment_text

#: Verdicts of the numbers are failures, everything that kept them from being judged is an error.
_FAILURES = (TestVerdict.MISMATCH, TestVerdict.NO_STANDARD, TestVerdict.INCOMPARABLE)

# What no XML 1.0 document may hold, not even escaped: a recipe's output may.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(assessments: Sequence[Assessment], *, name: str, not_run: Sequence[str] = ()) -> bytes:
    """Return the document.

    A quarantined failure blocks nothing, so it is ``skipped`` with its verdict as the message.

    Args:
        assessments: What was concluded, a case each.
        name: Of the test suite.
        not_run: Tests of which nothing was concluded because the check ended early: an error each.
    """
    suite = TestSuite(_text(name))
    for assessment in assessments:
        suite.add_testcase(_case(assessment))
    for test in not_run:
        case = _new_case(test)
        case.result = [_result(Error, "the check ended before this test ran", "not-run", "")]
        suite.add_testcase(case)
    document = JUnitXml("e2e-registry")
    document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]
    buffer = io.BytesIO()
    document.write(buffer)
    return buffer.getvalue()


def _new_case(test: str) -> TestCase:
    folder, _, file = test.rpartition("/")
    return TestCase(_text(file), classname=_text(folder.replace("/", ".")))


def _case(assessment: Assessment) -> TestCase:
    case = _new_case(assessment.subject)
    case.time = assessment.duration_s or 0.0
    verdict, report = assessment.verdict, assessment_text(assessment) + "\n"
    message = f"{verdict.value}: {_headline(assessment)}"
    if verdict is TestVerdict.SKIPPED or (assessment.quarantine is not None and not verdict.is_success):
        case.result = [_result(Skipped, message, verdict.value, report)]
    elif verdict in _FAILURES:
        case.result = [_result(Failure, message, verdict.value, report)]
    elif not verdict.is_success:
        case.result = [_result(Error, message, verdict.value, report)]
    else:
        case.system_out = _text(report)
    return case


def _result(kind: type[Error | Failure | Skipped], message: str, type_: str, text: str) -> Error | Failure | Skipped:
    result = kind(_text(message), type_)
    result.text = _text(text)
    return result


def _headline(assessment: Assessment) -> str:
    comparison = assessment.comparison
    if assessment.quarantine is not None:
        return f"quarantined {assessment.quarantine}"
    if assessment.reasons:
        return assessment.reasons[0]
    if assessment.error is not None:
        return str(assessment.error).splitlines()[0]
    if comparison is not None and comparison.first_divergence is not None:
        first = comparison.first_divergence
        return f"first divergence {first.key}, step {first.step}"
    return "see the report"


def _text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
