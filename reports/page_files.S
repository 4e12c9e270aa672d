// Whole files as read-only data: replayeval_<name>_begin .. replayeval_<name>_end (reports/html.cc).
#define EMBED(name, file)                 \
  .global replayeval_##name##_begin;      \
  .global replayeval_##name##_end;        \
  .balign 16;                             \
  replayeval_##name##_begin: .incbin file; \
  replayeval_##name##_end: .byte 0

.section .rodata
EMBED(page_css, PAGE_CSS)
EMBED(page_js, PAGE_JS)
EMBED(plotly_js, PLOTLY_JS)

.section .note.GNU-stack, "", %progbits
