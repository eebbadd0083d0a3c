# The way into interrupts.rs, once for each vector of each of the two tables (numbers 256 and up are the thief's).
#
# bare's stubs.rs has what each leaves on the stack.
.text
.balign 16
.global attacks_stubs
attacks_stubs:
bare_stubs 512, attacks_common

# Saves what a function may change, the x87's and SSE's state among it: the precompiled core uses SSE.
attacks_common:
  pushq %rax
  pushq %rcx
  pushq %rdx
  pushq %rsi
  pushq %rdi
  pushq %r8
  pushq %r9
  pushq %r10
  pushq %r11
  pushq %rbp
  movq %rsp, %rbp
  cld
  subq $512, %rsp
  andq $-16, %rsp
  fxsave64 (%rsp)
  movq %rbp, %rdi
  call attacks_interrupt
  fxrstor64 (%rsp)
  movq %rbp, %rsp
  popq %rbp
  popq %r11
  popq %r10
  popq %r9
  popq %r8
  popq %rdi
  popq %rsi
  popq %rdx
  popq %rcx
  popq %rax
  addq $16, %rsp                 # number, error code
  iretq

# u32 attacks_wrmsr(u32 register, u64 value): 1, or 0 if the processor refused (the handler of #GP goes on behind it).
.global attacks_wrmsr, attacks_wrmsr_here, attacks_wrmsr_refused
attacks_wrmsr:
  movl %edi, %ecx
  movl %esi, %eax
  movq %rsi, %rdx
  shrq $32, %rdx
attacks_wrmsr_here:
  wrmsr
  movl $1, %eax
  ret
attacks_wrmsr_refused:
  xorl %eax, %eax
  ret

# u32 attacks_attempt(void (*code)(void *), void *argument): 0, or 1 + the vector of the exception that ended it. The handler of an
# exception goes on at the second label, with that stack, while there is one.
.global attacks_attempt, attacks_attempt_ended, attacks_attempt_stack
attacks_attempt:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  subq $8, %rsp
  movq %rsp, attacks_attempt_stack(%rip)
  movq %rdi, %rax
  movq %rsi, %rdi
  call *%rax
  xorl %eax, %eax
attacks_attempt_ended:
  movq $0, attacks_attempt_stack(%rip)
  addq $8, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret

.data
.balign 8
attacks_attempt_stack:
  .quad 0
.text
