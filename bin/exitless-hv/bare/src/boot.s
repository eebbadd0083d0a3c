# From a multiboot loader (32-bit protected mode, paging off) into 64-bit mode, with the first 512 GiB mapped as they are.
#
# The header gives addresses (flag 16): the loader copies the file as it is and asks no ELF reader, which is as well, since
# QEMU's refuses 64-bit files.
.section .multiboot,"a"
.balign 4
bare_header:
  .long 0x1badb002, 0x00010003, -(0x1badb002 + 0x00010003)
  .long bare_header, BASE, bare_load_end, bare_end, bare_start

.text
.code32
.global bare_start
bare_start:
  cli
  cld
  movl %eax, %esi                # the loader's word
  movl %ebx, %ebp                # its information
  # Nobody else has cleared the memory that the file does not have: a hypervisor's guest may be started twice.
  movl $bare_load_end, %edi
  movl $bare_end, %ecx
  subl %edi, %ecx
  xorl %eax, %eax
  rep stosb
  movl $bare_stack_top, %esp
  # 512 entries of 1 GiB.
  movl $bare_pdpt, %edi
  xorl %ecx, %ecx
1:
  movl %ecx, %eax
  shll $30, %eax
  orl $0x83, %eax
  movl %eax, (%edi,%ecx,8)
  movl %ecx, %eax
  shrl $2, %eax
  movl %eax, 4(%edi,%ecx,8)
  incl %ecx
  cmpl $512, %ecx
  jb 1b
  movl $bare_pdpt + 3, bare_pml4
  call bare_long_mode
  ljmp $8, $bare_start64

# Turns 64-bit mode on, from 32-bit mode without paging; also another processor's way. Uses eax, ecx, edx.
.global bare_long_mode
bare_long_mode:
  movl %cr4, %eax
  orl $0x620, %eax               # PAE, SSE
  movl %eax, %cr4
  movl $bare_pml4, %eax
  movl %eax, %cr3
  movl $0xc0000080, %ecx
  rdmsr
  orl $0x100, %eax               # long mode
  wrmsr
  movl %cr0, %eax
  andl $0xfffffffb, %eax         # SSE, not emulated
  orl $0x80000003, %eax
  movl %eax, %cr0
  lgdt bare_gdt_pointer
  ret

.code64
bare_start64:
  movw $16, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
  xorl %eax, %eax
  movw %ax, %fs
  movw %ax, %gs
  movl $bare_stack_top, %esp
  movl %esi, %edi
  movl %ebp, %esi
  call bare_main
1:
  hlt
  jmp 1b

.data
.balign 16
.global bare_gdt_pointer
bare_gdt:
  .quad 0
  .quad 0x00af9b000000ffff       # 8: code
  .quad 0x00cf93000000ffff       # 16: data
bare_gdt_pointer:
  .word 23
  .quad bare_gdt

.bss
.balign 4096
.global bare_pml4, bare_pdpt
bare_pml4: .skip 4096
bare_pdpt: .skip 4096
.skip 65536
bare_stack_top:
