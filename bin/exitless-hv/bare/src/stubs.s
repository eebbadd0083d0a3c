# Handlers of interrupts, 16 bytes each: what they leave on the stack is a number, and an error code, whether the processor pushed one or
# not. A program includes this before its own assembler.
.macro bare_stubs count, common
  .set number, 0
  .rept \count
    .balign 16
    .set vector, number & 255
    # These push an error code by themselves: 8, 10 to 14, 17, 21, 29, 30.
    .if (vector > 31) || (((0x60227d00 >> vector) & 1) == 0)
    pushq $0
    .endif
    pushq $number
    jmp \common
    .set number, number + 1
  .endr
.endm
