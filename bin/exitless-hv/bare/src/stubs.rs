//! Handlers of interrupts, as text for the assembler of a program that includes its own behind it.

/// Defines the assembler macro `bare_stubs count, common`: handlers of 16 bytes each, which leave a
/// number and an error code on the stack, whether the processor pushed one or not, and go on at
/// `common`. The first piece of a `global_asm!` in AT&T syntax.
#[macro_export]
macro_rules! stubs {
    () => {
        r#"
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
"#
    };
}
