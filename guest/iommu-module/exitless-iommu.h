/* SPDX-License-Identifier: GPL-2.0 */
/*
 * exitless-iommu: virtio-iommu driver that gives PCI endpoints their own DMA operations.
 *
 * Protocol: Virtual I/O Device (VIRTIO) 1.3, section 5.13 "IOMMU Device"; endpoint numbers come
 * from the ACPI table VIOT.
 *
 * Locks, in the order in which they are taken:
 *
 *   exi_control_lock	  mutex: held while drivers are bound and unbound on request
 *   exi_instances_lock	  mutex: list of devices; changes need both, reading needs either
 *   (the driver core's lock of an endpoint's device)
 *   exi_iommu.mutex	  mutex: list of endpoints, their binding state
 *   exi_ep.lock	  spinlock, interrupts off: tables, stale list and counters of one endpoint
 *   exi_iommu.vq_lock	  spinlock, interrupts off: request queue, slots, deferred UNMAPs
 *
 * No lock is held while a CPU polls for the answer to its request. DMA unmapping runs in hard
 * interrupts and mapping runs with interrupts off, so nothing on those paths sleeps.
 */
#ifndef EXITLESS_IOMMU_H
#define EXITLESS_IOMMU_H

#ifndef CONFIG_X86_64
#error "coherent DMA, and the interrupt messages of x86, are assumed"
#endif

#include <linux/dma-map-ops.h>
#include <linux/hashtable.h>
#include <linux/idr.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/version.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>
#include <uapi/linux/virtio_iommu.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0) && !defined(CONFIG_ARCH_HAS_DMA_OPS)
#error "this kernel has no per-device DMA operations (CONFIG_ARCH_HAS_DMA_OPS)"
#elif LINUX_VERSION_CODE < KERNEL_VERSION(6, 10, 0) && !defined(CONFIG_DMA_OPS)
#error "this kernel has no per-device DMA operations (CONFIG_DMA_OPS)"
#endif
#ifndef CONFIG_NEED_SG_DMA_LENGTH
#error "scatterlist entries need a DMA length of their own (CONFIG_NEED_SG_DMA_LENGTH)"
#endif

/* Upper end of all I/O virtual addresses: 48 bits is what every PCI function can emit. */
#define EXI_IOVA_LAST		DMA_BIT_MASK(48)
/* Requests that may be outstanding: the ring has two descriptors for each, at most this many. */
#define EXI_SLOTS_MAX		128
/*
 * A request is overdue only after this many looks at the used ring, however much time passed: a
 * virtual CPU that was descheduled sees time pass without having looked.
 */
#define EXI_MIN_LOOKS		10000
/* Bounds of the same wait while the device is suspect. */
#define EXI_SUSPECT_US		100
#define EXI_SUSPECT_LOOKS	100
/* Mappings that one UNMAP request may cover. */
#define EXI_RANGE_MAX		256
/* Stale mappings evicted at once when an endpoint exceeds its quota: one notification for all. */
#define EXI_EVICT_BATCH		32
/* UNMAP requests that fail are repeated this often, then the address range is given up. */
#define EXI_UNMAP_TRIES		8
#define EXI_HASH_BITS		12
#define EXI_EVENTS		16

enum exi_reuse {
	EXI_REUSE_NONE,
	EXI_REUSE_SHARED,
	EXI_REUSE_ASYNC,
	EXI_REUSE_OPTIMISTIC,
	EXI_REUSE_RTC,
};

enum exi_map_state {
	EXI_MAP_SENT,		/* MAP request outstanding */
	EXI_MAP_MAPPED,		/* MAP request succeeded, or failed without a status */
	EXI_MAP_FAILED,		/* MAP request refused: nothing is mapped */
};

/* One mapping of physically contiguous pages, as one MAP request created it. */
struct exi_map {
	struct hlist_node by_key;	/* in exi_ep.by_key while it may be reused */
	struct hlist_node by_iova;	/* in exi_ep.by_iova while the driver or the cache has it */
	struct list_head link;		/* on one of: batch, slot, stale list, deferred, lost */
	struct list_head cycle;		/* on exi_ep.fifo since its first release (rtc) */
	struct exi_ep *ep;
	unsigned long pfn;		/* first guest-physical page */
	unsigned long iova;		/* first page of I/O virtual addresses */
	unsigned long released;		/* jiffies of the last release */
	u32 pages;			/* pages mapped */
	u32 span;			/* pages of I/O virtual addresses allocated, >= pages */
	u32 users;			/* dma_map calls not yet undone; rtc: "reusing" if > 0 */
	u32 cycle_no;			/* rtc: cycle of the first release */
	u8 prot;			/* VIRTIO_IOMMU_MAP_F_* */
	u8 state;			/* enum exi_map_state */
	u8 tries;			/* UNMAP requests that failed */
	bool stale;			/* no user, but still mapped */
	bool expired;			/* rtc: to be removed at its release */
	bool quarantined;		/* counted as such: its removal is not confirmed */
};

/* Waits for a group of requests. Lives on the waiter's stack; the device never sees it. */
struct exi_batch {
	unsigned int pending;		/* stored with release, loaded with acquire */
	int err;
	struct list_head maps;		/* MAP requests: the mappings, unless abandoned */
};

/* Memory of one request that is or may be with the device. */
struct exi_slot {
	u8 buf[64];			/* device-readable part, then tail */
	u16 out;			/* bytes of the device-readable part */
	u8 type;			/* VIRTIO_IOMMU_T_* */
	bool busy;
	bool late;			/* its waiter gave up */
	bool async;			/* nobody waits for it */
	struct exi_batch *batch;	/* NULL if nobody waits (any more) */
	struct exi_map *map;		/* MAP: the mapping */
	struct list_head maps;		/* UNMAP: the mappings that it removes */
	void *probe;			/* PROBE: request and reply, freed here if late */
	u32 probe_in;			/* PROBE: bytes of the device-writable part */
};

/* Counters of one endpoint. Those above the line change under exi_ep.lock. */
struct exi_ep_stats {
	u64 maps, unmaps, hits, shared, misses, map_failures, unknown_unmaps;
	u64 evictions, expiries, flushes;
	u64 live, live_max, stale, stale_max, stale_age_max_ms;
	/* under exi_iommu.vq_lock: */
	u64 req_map, req_unmap, removed;
};

/* Counters of the device, under exi_iommu.vq_lock. */
struct exi_stats {
	u64 req_attach, req_detach, req_probe, kicks;
	u64 spin_max_us, errors, timeouts, late, resumed, suspect_calls;
	u64 quarantined, quarantined_total, lost, faults;
};

struct exi_ep {
	struct dma_map_ops ops;		/* container_of(dev->dma_ops) finds the endpoint */
	struct list_head link;
	struct exi_iommu *iommu;
	struct device *dev;
	u32 id;				/* endpoint number, from VIOT */
	u32 domain;
	bool attached, bound, removed, stopped;
	bool attach_sent;		/* the device may hold it attached, confirmed or not */
	bool reattach;			/* its driver was released by us: bind again at unload */
	atomic_t nmaps;			/* struct exi_map that name this endpoint */
	struct iova_domain iovad;

	spinlock_t lock;
	DECLARE_HASHTABLE(by_key, EXI_HASH_BITS);
	DECLARE_HASHTABLE(by_iova, EXI_HASH_BITS);
	struct list_head stale;		/* by time of release */
	u32 nstale;
	struct list_head fifo;		/* rtc: by time of first release */
	u32 cycle_now;			/* rtc */
	unsigned long cycle_start;	/* rtc: jiffies */
	struct exi_ep_stats st;
};

struct exi_viot_range {
	u16 segment_start, segment_end, bdf_start, bdf_end;
	u32 endpoint_start;
};

struct exi_iommu {
	struct list_head instance;
	struct virtio_device *vdev;
	struct pci_dev *pdev;		/* the device itself: never an endpoint */
	struct virtqueue *vqs[2];
	u64 iova_first, iova_last;	/* input range, cut to EXI_IOVA_LAST */
	u32 domain_first, domain_last, probe_size;
	bool has_mmio, closing;
	struct exi_viot_range *ranges;
	u32 nranges;

	struct mutex mutex;
	struct list_head eps;
	struct ida domains;
	struct notifier_block nb;
	struct iommu_device stub;
	struct exi_ep_stats retired;	/* sums of endpoints that were removed */

	spinlock_t vq_lock;
	struct exi_slot *slots;
	u16 free_slots[EXI_SLOTS_MAX];
	u32 nslots, nfree, async_out, unkicked;
	bool suspect;			/* a request is overdue; cleared by any completion */
	bool broken;			/* the ring is corrupt: until unload */
	struct list_head deferred;	/* mappings whose UNMAP could not be sent yet */
	struct list_head lost;		/* mappings whose UNMAP kept failing */
	struct exi_stats st;

	atomic_long_t live, stale, live_max, stale_max;
	struct workqueue_struct *wq;
	struct delayed_work work;	/* expiry, deferred UNMAPs, watch over a suspect device */
	struct delayed_work kick_work;	/* async: sends what has not been notified */
	struct work_struct event_work;
	struct virtio_iommu_fault *events;
};

/* Counts up and keeps the maximum, which may miss a peak that two CPUs reach together. */
static inline void exi_count_up(atomic_long_t *now, atomic_long_t *max)
{
	long value = atomic_long_inc_return(now);

	if (value > atomic_long_read(max))
		atomic_long_set(max, value);
}

/* main.c */
extern struct mutex exi_control_lock;
extern struct mutex exi_instances_lock;
extern struct list_head exi_instances;
extern unsigned int exi_poll_us;
extern unsigned int exi_quota;
extern unsigned int exi_residency_ms;
extern unsigned int exi_ttl_ms;
extern unsigned int exi_cycles;
enum exi_reuse exi_policy(void);
const char *exi_policy_name(enum exi_reuse policy);
#ifdef EXITLESS_IOMMU_TEST
bool exi_muted(void);
#else
static inline bool exi_muted(void) { return false; }
#endif

/* viot.c */
int exi_viot_read(struct exi_iommu *iommu);
bool exi_viot_endpoint(const struct exi_iommu *iommu, struct pci_dev *pdev, u32 *id);

/* request.c: the device's request queue */
int exi_requests_init(struct exi_iommu *iommu);
void exi_requests_release(struct exi_iommu *iommu);
void exi_batch_init(struct exi_batch *batch);
int exi_queue_map(struct exi_map *map, struct exi_batch *batch);
void exi_queue_unmap(struct exi_ep *ep, struct list_head *run, struct exi_batch *batch);
int exi_wait(struct exi_iommu *iommu, struct exi_batch *batch);
void exi_kick(struct exi_iommu *iommu);
void exi_kick_fn(struct work_struct *work);
void exi_async_bound(struct exi_iommu *iommu);
int exi_request_attach(struct exi_ep *ep);
int exi_request_detach(struct exi_ep *ep);
int exi_request_probe(struct exi_iommu *iommu, u32 endpoint, u8 **properties, void **buf);

/* completion.c: with vq_lock held */
void exi_reap(struct exi_iommu *iommu);
void exi_slot_put(struct exi_iommu *iommu, struct exi_slot *slot);

/* recovery.c: overdue requests and unconfirmed removals */
void exi_quarantine(struct exi_iommu *iommu, struct exi_map *map);
void exi_defer(struct exi_iommu *iommu, struct list_head *maps);
void exi_send_deferred(struct exi_iommu *iommu);
void exi_forget_quarantine(struct exi_ep *ep);
void exi_set_suspect(struct exi_iommu *iommu);
void exi_clear_suspect(struct exi_iommu *iommu);
bool exi_watch_suspect(struct exi_iommu *iommu);
bool exi_reap_suspect(struct exi_iommu *iommu);

/* mapping.c: I/O virtual addresses and tables of one endpoint */
extern struct kmem_cache *exi_map_cache;
struct exi_map *exi_map_alloc(struct exi_ep *ep, phys_addr_t phys, size_t size, u8 prot,
			      unsigned long last_pfn);
void exi_map_free(struct exi_map *map);
struct exi_map *exi_get(struct exi_ep *ep, phys_addr_t phys, size_t size, u8 prot,
			unsigned long last_pfn);
void exi_insert(struct exi_ep *ep, struct list_head *maps, bool reusable);
void exi_put(struct exi_ep *ep, dma_addr_t addr, bool keep, struct list_head *dead);
void exi_unlink(struct exi_ep *ep, struct exi_map *map, struct list_head *dead);
void exi_unmap_list(struct exi_ep *ep, struct list_head *dead, bool async);
unsigned int exi_kill_all(struct exi_ep *ep);

/* reuse.c: which mappings outlive their last user, and for how long */
bool exi_may_match(const struct exi_map *map, enum exi_reuse policy);
void exi_match(struct exi_ep *ep, struct exi_map *map);
void exi_release(struct exi_ep *ep, struct exi_map *map, bool keep, struct list_head *dead);
void exi_drop_stale(struct exi_ep *ep);
void exi_work_fn(struct work_struct *work);
void exi_rearm(void);

/* endpoint.c */
int exi_endpoints_start(struct exi_iommu *iommu);
void exi_close(struct exi_iommu *iommu);
void exi_endpoints_stop(struct exi_iommu *iommu);
void exi_endpoints_free(struct exi_iommu *iommu);
void exi_retire_removed(struct exi_iommu *iommu);

/* control.c */
void exi_take_bound(struct exi_iommu *iommu, bool rebind);
extern const struct attribute_group *exi_driver_groups[];

/* dma_ops.c */
extern const struct dma_map_ops exi_dma_ops;
extern const struct dma_map_ops exi_refuse_ops;

/* event.c */
void exi_event_interrupt(struct virtqueue *vq);
void exi_event_fn(struct work_struct *work);
int exi_events_fill(struct exi_iommu *iommu);

/* debugfs.c */
void exi_debugfs_init(void);
void exi_debugfs_exit(void);
void exi_stats_sum(struct exi_ep_stats *sum, const struct exi_ep_stats *st);

#endif
