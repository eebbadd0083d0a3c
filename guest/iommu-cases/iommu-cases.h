/* SPDX-License-Identifier: GPL-2.0 */
/*
 * iommu-cases: sends requests to a virtio-iommu device as a driver that breaks every rule, and
 * has another device access memory one byte at a time.
 *
 * Protocol: Virtual I/O Device (VIRTIO) 1.3, section 5.13 "IOMMU Device". Both devices are driven
 * by their registers (4.1), past Linux's drivers of virtio, so that each descriptor is the
 * case's own, and each address that a device is given is an I/O virtual address of its choice.
 *
 * One thread: the one that loads the module. Nothing is locked, nothing interrupts.
 */
#ifndef IOMMU_CASES_H
#define IOMMU_CASES_H

#include <linux/io.h>
#include <linux/pci.h>
#include <linux/types.h>
#include <uapi/linux/virtio_iommu.h>

/* Descriptors of a queue, if the device has so many. */
#define QUEUE_SIZE	16
/* An answer is awaited so long, and so many looks at the ring. */
#define ANSWER_SECONDS	10
#define ANSWER_LOOKS	10000
/* What an answer's bytes are before the device writes them. No status has this value. */
#define UNWRITTEN	0xee

/* function.c: a PCI function by its registers */

struct function {
	struct pci_dev *pdev;
	void __iomem *common, *notify, *config;
	u32 notify_multiplier;
};

/* A split ring in a page of its own. */
struct queue {
	struct function *fn;
	void *page;
	u16 index, size, avail, used;
	void __iomem *bell;
};

/* A buffer, at an address as the device has it. */
struct segment {
	u64 at;
	u32 len;
	bool is_written;
};

enum answer {
	ANSWERED,
	SILENT,		/* nothing came in time */
	BROKEN,		/* the device says that it needs a reset */
};

int function_open(struct function *fn, struct pci_dev *pdev);
void function_close(struct function *fn);
int function_reset(struct function *fn);
int function_negotiate(struct function *fn, u64 features);
void function_go(struct function *fn);
u64 function_features(struct function *fn);
bool function_needs_reset(struct function *fn);
int queue_alloc(struct queue *queue, struct function *fn, u16 index);
void queue_free(struct queue *queue);
int queue_start(struct queue *queue);
void queue_post(struct queue *queue, u16 first, const struct segment *segments, unsigned int count);
void queue_kick(struct queue *queue);
bool queue_take(struct queue *queue, u16 *id, u32 *len);
enum answer queue_wait(struct queue *queue, unsigned int seconds, u16 *id, u32 *len);

/* request.c: the IOMMU, and a case under way */

struct iommu {
	struct function fn;
	struct queue requests, events;
	u8 *out, *in;			/* device-readable and device-writable bytes of a request */
	struct virtio_iommu_fault *reports;
	u16 event_len;			/* bytes of each event buffer */
	u64 input_first, input_last;
	u32 domain_last, probe_size;
	u64 resv_first, resv_last;	/* the first reserved region, if there is any */
	bool has_resv;
};

struct run {
	struct iommu *iommu;
	struct accessor *accessor;
	u32 endpoint, other;		/* the one that accesses memory, and one that only attaches */
	u32 domain;			/* the first of DOMAINS that are this case's alone */
	bool is_over;			/* the device answers no more: what is left is not asked */
	char line[512];
	int len;
};

#define DOMAINS 4

/* A request's bytes and how they are cut: see request.c. */
struct cut {
	const char *name;
	unsigned int out_len, in_len;	/* bytes that the device reads, and that it writes */
	unsigned int out_cut, in_cut;	/* bytes of each descriptor; 0: one for all */
	unsigned int tail_at;		/* in what it writes */
};

int iommu_open(struct iommu *iommu, struct pci_dev *pdev);
void iommu_close(struct iommu *iommu);
int iommu_start(struct iommu *iommu, u64 without);
void iommu_set_bypass(struct iommu *iommu, u8 value);
u8 iommu_bypass(struct iommu *iommu);
void iommu_forget(struct run *run);

__printf(2, 3) void say(struct run *run, const char *format, ...);
void send(struct run *run, const struct cut *cut);
bool succeeds(struct run *run, unsigned int out_len);
/* Fill in iommu->out, whose unset bytes are 0; the size of the part that the device reads. */
unsigned int make_attach(struct run *run, u32 domain, u32 endpoint, u32 flags);
unsigned int make_detach(struct run *run, u32 domain, u32 endpoint);
unsigned int make_map(struct run *run, u32 domain, u64 start, u64 end, u64 phys, u32 flags);
unsigned int make_unmap(struct run *run, u32 domain, u64 start, u64 end);
unsigned int make_probe(struct run *run, u32 endpoint);
/* The same, sent as the specification has them. */
void attach(struct run *run, u32 domain, u32 endpoint, u32 flags);
void detach(struct run *run, u32 domain, u32 endpoint);
void map_range(struct run *run, u32 domain, u64 start, u64 end, u64 phys, u32 flags);
void unmap(struct run *run, u32 domain, u64 start, u64 end);
void probe(struct run *run, u32 endpoint);
void fault(struct run *run);

/* access.c: the device that accesses memory, and the memory */

struct accessor {
	struct function fn;
	struct queue queue;
	struct page *pages;
	u8 *memory;
};

/* Pages of the memory that is watched. Cases map even ones, so that each has neighbours. */
#define WATCHED_ORDER	5
#define WATCHED		(1 << WATCHED_ORDER)

int accessor_open(struct accessor *accessor, struct pci_dev *pdev);
void accessor_close(struct accessor *accessor);
u64 watched(const struct run *run, unsigned int page);
void open_domain(struct run *run, u32 domain);
void map(struct run *run, u32 domain, u64 iova, unsigned int pages, unsigned int page, u32 flags);
void access(struct run *run, u64 iova, unsigned int len);

/* cases.c, cases_map.c, cases_access.c */

struct iommu_case {
	const char *name;
	void (*run)(struct run *run);
	u64 without;			/* features that are not negotiated */
	u16 event_len;			/* bytes of each event buffer; 0: as long as a report */
};

extern const struct iommu_case request_cases[], mapping_cases[], access_cases[];
extern const unsigned int request_case_count, mapping_case_count, access_case_count;
extern const struct iommu_case last_case;

#endif
