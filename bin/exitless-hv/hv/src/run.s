# Entering the guest, and the handlers of the host's interrupts.
#
# The host takes interrupts in one place only, `host_window`: elsewhere they are held by the global interrupt flag. So the
# precompiled core library, which has a red zone and uses SSE, is never interrupted by one, and the handlers below save no more
# than they use.

.text

# Handlers of a guest's core: note the vector in that core's area (`host.rs`), to which GS leads, and return.
.set AREA_TAKEN_LEN, 256
.set AREA_NMIS, 264
.global host_stubs
.balign 16
host_stubs:
  bare_stubs 256, host_common
host_common:
  pushq %rax
  pushq %rcx
  movq 16(%rsp), %rax
  cmpq $32, %rax
  jae 2f
  cmpq $2, %rax
  je 3f
  # QEMU now and then delivers an interrupt that is gone by the time it asks for the vector: vector -1, and so #GP with code -6,
  # which no processor raises. It is nobody's.
  cmpq $13, %rax
  jne 5f
  cmpl $-6, 24(%rsp)
  je 6f
  cmpq $host_rdmsr_here, 32(%rsp)
  je 7f
5:
  movq 16(%rsp), %rdi            # vector, code, address: an exception of the hypervisor's own
  movq 24(%rsp), %rsi
  movq 32(%rsp), %rdx
  andq $-16, %rsp
  call host_fault
7:
  movq $host_rdmsr_refused, 32(%rsp)
  jmp 4f
6:
  lock incq HOST_SPURIOUS(%rip)
  jmp 4f
3:
  incq %gs:AREA_NMIS
  jmp 4f
2:
  movq %gs:AREA_TAKEN_LEN, %rcx
  andq $255, %rcx
  movb %al, %gs:(%rcx)
  incq %gs:AREA_TAKEN_LEN
4:
  popq %rcx
  popq %rax
  addq $16, %rsp
  iretq

# Lets pending interrupts in, through the handlers above.
.global host_window
host_window:
  stgi
  sti
  nop
  nop
  nop
  cli
  clgi
  ret

# Halts until an interrupt comes, and lets it in. One that can be masked and is pending already ends the halt; a non-maskable one may
# come just before it.
.global host_idle
host_idle:
  stgi
  sti
  hlt
  cli
  clgi
  ret

# Lets a pending non-maskable interrupt in.
.global host_window_nmi
host_window_nmi:
  stgi
  nop
  nop
  clgi
  ret

# u64 host_rdmsr(u32 register, u8 *is_there): 0 if the processor has none; the handler of #GP goes on behind it.
.global host_rdmsr
host_rdmsr:
  movl %edi, %ecx
host_rdmsr_here:
  rdmsr
  shlq $32, %rdx
  orq %rdx, %rax
  movb $1, (%rsi)
  ret
host_rdmsr_refused:
  xorl %eax, %eax
  movb $0, (%rsi)
  ret

# guest_run(rdi = guest's control block, rsi = its registers, rdx = host's control block)
#
# Registers: 16 words in the order of their numbers (rax and rsp are in the block), then 512 bytes for FXSAVE.
.global guest_run
guest_run:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  pushq %rsi
  pushq %rdx
  pushq %rdi
  clgi
  sti                            # with the guest's flag not masking them, physical interrupts ask the host's
  fxrstor64 128(%rsi)
  movq %rdi, %rax
  vmload %rax
  movq 8(%rsi), %rcx
  movq 16(%rsi), %rdx
  movq 24(%rsi), %rbx
  movq 40(%rsi), %rbp
  movq 56(%rsi), %rdi
  movq 64(%rsi), %r8
  movq 72(%rsi), %r9
  movq 80(%rsi), %r10
  movq 88(%rsi), %r11
  movq 96(%rsi), %r12
  movq 104(%rsi), %r13
  movq 112(%rsi), %r14
  movq 120(%rsi), %r15
  movq 48(%rsi), %rsi
  vmrun %rax
  pushq %rdi
  movq 24(%rsp), %rdi
  movq %rcx, 8(%rdi)
  movq %rdx, 16(%rdi)
  movq %rbx, 24(%rdi)
  movq %rbp, 40(%rdi)
  movq %rsi, 48(%rdi)
  movq %r8, 64(%rdi)
  movq %r9, 72(%rdi)
  movq %r10, 80(%rdi)
  movq %r11, 88(%rdi)
  movq %r12, 96(%rdi)
  movq %r13, 104(%rdi)
  movq %r14, 112(%rdi)
  movq %r15, 120(%rdi)
  popq %rax
  movq %rax, 56(%rdi)
  fxsave64 128(%rdi)
  movq (%rsp), %rax
  vmsave %rax
  movq 8(%rsp), %rax
  vmload %rax
  cli
  cld
  addq $24, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret

# Another core: from real mode, at a page below 1 MiB to which this is copied, to CORE_MAIN on the stack CORE_STACK (`cores.rs`).
.global core_begin, core_end
.balign 16
core_begin:
.code16
  cli
  xorw %ax, %ax
  movw %ax, %ds
  lgdtl 0x8000 + core_gdt_pointer - core_begin
  movl %cr0, %eax
  orl $1, %eax
  movl %eax, %cr0
  ljmpl $8, $(0x8000 + core_protected - core_begin)
.code32
core_protected:
  movw $16, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
  movl CORE_STACK, %esp
  movl $bare_long_mode, %eax
  call *%eax
  ljmp $8, $core_start64
.balign 8
core_gdt:
  .quad 0
  .quad 0x00cf9b000000ffff
  .quad 0x00cf93000000ffff
core_gdt_pointer:
  .word 23
  .long 0x8000 + core_gdt - core_begin
core_end:
.code64
core_start64:
  movw $16, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
  xorl %eax, %eax
  movw %ax, %fs
  movw %ax, %gs
  movq CORE_STACK(%rip), %rsp
  call *CORE_MAIN(%rip)
1:
  cmpb $0, CORE1_POLLS(%rip)
  jne 2f
  sti
  hlt
  jmp 1b
2:
  sti                            # interrupts come here alone
  nop
  nop
  cli
  cld
  call core1_poll
  jmp 2b

# Handlers of the core that watches: maskable interrupts come within the loops above alone, which keep nothing in registers, so
# all are free. A non-maskable one may find anything, and uses none.
.global core1_stubs
.balign 16
core1_stubs:
  bare_stubs 256, core1_common
core1_common:
  cmpq $2, (%rsp)
  je 1f
  movq (%rsp), %rdi              # vector, code, address
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  movq %rsp, %rbp
  andq $-16, %rsp
  call core1_interrupt
  movq %rbp, %rsp
  jmp 2f
1:
  lock incq CORE1_NMIS(%rip)
  lock incq CORE1_FOREIGN(%rip)
2:
  addq $16, %rsp
  iretq
