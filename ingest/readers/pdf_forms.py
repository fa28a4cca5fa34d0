"""What somebody wrote onto a page of a PDF: values of form fields, and text boxes. Neither is in its text layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pypdfium2
from pypdfium2 import raw

_UNSEEN = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
_TICKED = frozenset({raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON})
_WRITTEN = frozenset({raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX})
# Of a text field (PDF 1.7, table 228).
_PASSWORD = 1 << 13


def filled_in(page: pypdfium2.PdfPage) -> list[str]:
    """A line for each form field that has a value, such as "Last name: Ng", and for each text box.

    Fields need `init_forms` of the document. A field is called what its tooltip says, or else its name.
    """
    return [line for line in (" ".join(text.split()) for text in _texts(page)) if line]


def _texts(page: pypdfium2.PdfPage) -> Iterator[str]:
    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        note = raw.FPDFPage_GetAnnot(page, index)
        kind = raw.FPDFAnnot_GetSubtype(note)
        if not raw.FPDFAnnot_GetFlags(note) & _UNSEEN:
            if kind == raw.FPDF_ANNOT_FREETEXT:
                yield _string(raw.FPDFAnnot_GetStringValue, note, b"Contents")
            elif kind == raw.FPDF_ANNOT_WIDGET and page.formenv is not None:
                yield _field(page.formenv, note)
        raw.FPDFPage_CloseAnnot(note)


def _field(forms: pypdfium2.PdfFormEnv, field: Any) -> str:
    kind = raw.FPDFAnnot_GetFormFieldType(forms, field)
    value = ""
    if kind in _TICKED and raw.FPDFAnnot_IsChecked(forms, field):
        value = _string(raw.FPDFAnnot_GetFormFieldExportValue, forms, field)
    elif kind in _WRITTEN and not raw.FPDFAnnot_GetFormFieldFlags(forms, field) & _PASSWORD:
        value = _string(raw.FPDFAnnot_GetFormFieldValue, forms, field)
    if not value.strip():
        return ""
    name = _string(raw.FPDFAnnot_GetFormFieldName, forms, field).rpartition(".")[2].partition("[")[0]
    return f"{_string(raw.FPDFAnnot_GetFormFieldAlternateName, forms, field) or name}: {value}"


def _string(get: Callable[..., int], *what: Any) -> str:
    size = get(*what, None, 0)
    buffer = ctypes.create_string_buffer(size)
    get(*what, ctypes.cast(buffer, ctypes.POINTER(raw.FPDF_WCHAR)), size)
    return buffer.raw.decode("utf-16-le", "replace").rstrip("\0")
