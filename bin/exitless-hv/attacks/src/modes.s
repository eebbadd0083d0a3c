# Another processor mode: out of long mode, some time in 32-bit protected mode with paging, and back (modes.rs).
#
# The way leads through a 32-bit segment of long mode, so that the code is the same on both sides of the change. All of it, its data and
# its stack are in the first 2 MiB.
.text
.code64

# u32 attacks_other_mode(void): 1, or 0 if the processor refused. What it is to do is in attacks_modes (modes.rs: Order).
.set o_root_both, 0
.set o_root_32, 4
.set o_root_64, 8
.set o_slot, 12
.set o_slot_32, 16
.set o_slot_64, 20
.set o_efer, 24
.set o_by_rules, 28
.set o_times, 32
.set o_pause, 36
.set o_own, 40
.set o_stolen, 44
.set o_changed, 48
.set o_efer_64, 52
.set o_stack, 56

.global attacks_other_mode, attacks_modes_here, attacks_modes_refused, attacks_modes
attacks_other_mode:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  cli
  movl %esp, attacks_modes + o_stack
  movl attacks_modes + o_root_both, %eax
  movq %rax, %cr3
  pushq $0x28
  pushq $modes_32
  lretq

.code32
modes_32:
  movl $0xc0000080, %ecx
  rdmsr
  movl %eax, attacks_modes + o_efer_64
  cmpl $0, attacks_modes + o_by_rules
  je 1f
  # Paging off ends long mode; it may be chosen then.
  movl %cr0, %eax
  andl $0x7fffffff, %eax
  movl %eax, %cr0
1:
  movl attacks_modes + o_efer, %eax
  movl $0xc0000080, %ecx
attacks_modes_here:
  wrmsr
  movl attacks_modes + o_slot, %edi
  movl attacks_modes + o_slot_32, %eax
  movl %eax, (%edi)
  movl attacks_modes + o_root_32, %eax
  movl %eax, %cr3
  movl %cr0, %eax
  orl $0x80000000, %eax
  movl %eax, %cr0
  movl $1, attacks_modes + o_changed
  sti

2:
  # An interrupt to itself, and a pause.
  movl $0x83f, %ecx
  movl $0x41, %eax
  xorl %edx, %edx
  wrmsr
  rdtsc
  movl %eax, %esi
3:
  pause
  rdtsc
  subl %esi, %eax
  cmpl attacks_modes + o_pause, %eax
  jb 3b
  decl attacks_modes + o_times
  jnz 2b

modes_restore:
  cli
  cmpl $0, attacks_modes + o_by_rules
  je 4f
  movl %cr0, %eax
  andl $0x7fffffff, %eax
  movl %eax, %cr0
4:
  movl attacks_modes + o_slot, %edi
  movl attacks_modes + o_slot_64, %eax
  movl %eax, (%edi)
  movl attacks_modes + o_root_both, %eax
  movl %eax, %cr3
  movl $0xc0000080, %ecx
  rdmsr
  movl attacks_modes + o_efer_64, %eax
  cmpl $0, attacks_modes + o_by_rules
  je 5f
  andl $~0x400, %eax             # the processor sets it, with paging
5:
  wrmsr
  movl %cr0, %eax
  orl $0x80000000, %eax
  movl %eax, %cr0
attacks_modes_refused:
  ljmp $8, $modes_64

.code64
modes_64:
  movl attacks_modes + o_stack, %esp
  movl attacks_modes + o_root_64, %eax
  movq %rax, %cr3
  movl attacks_modes + o_changed, %eax
  sti
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret

# Handlers of the 32-bit table: an interrupt of the guest's own, one of the host's class, an exception.
.code32
.global attacks_modes_own, attacks_modes_stolen, attacks_modes_fault
attacks_modes_own:
  incl attacks_modes + o_own
  jmp modes_eoi
attacks_modes_stolen:
  incl attacks_modes + o_stolen
modes_eoi:
  pushl %eax
  pushl %ecx
  pushl %edx
  movl $0x80b, %ecx
  xorl %eax, %eax
  xorl %edx, %edx
  wrmsr
  popl %edx
  popl %ecx
  popl %eax
  iretl
attacks_modes_fault:
  movl $2, attacks_modes + o_changed
  movl attacks_modes + o_stack, %esp
  jmp modes_restore
.code64
