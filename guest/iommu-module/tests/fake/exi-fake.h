/* SPDX-License-Identifier: GPL-2.0 */
#ifndef EXI_FAKE_H
#define EXI_FAKE_H

#include <linux/types.h>

/* device.c: how requests are answered, and what is mapped */
enum fake_mode {
	FAKE_OK,
	FAKE_MAP_FAILS,		/* the MAP after `fail_after` others, then all: NOMEM */
	FAKE_UNMAP_FAILS,	/* every UNMAP: DEVERR, nothing removed */
	FAKE_UNWRITTEN,		/* buffers come back unwritten, used length 0 */
	FAKE_HOLD,		/* nothing is answered until fake_release() */
	FAKE_BAD_ID,		/* the used ring names a descriptor that is not outstanding */
};

struct fake_mapping {
	u64 first, last, phys;
	u32 flags;
};

void fake_set_mode(enum fake_mode mode, unsigned int fail_after);
void fake_release(bool reverse);
bool fake_translate(u64 iova, struct fake_mapping *mapping);
unsigned int fake_mapped(void);
unsigned int fake_violations(void);
u64 fake_maps(void);

/* client.c */
int fake_client_init(void);
void fake_client_exit(void);

#endif
