// SPDX-License-Identifier: GPL-2.0
/*
 * Reuse policies: which mappings outlive their last user, and for how long.
 *
 *   none, async	a mapping is removed at its release (async: without waiting)
 *   shared		further uses while it is in use; removed at its last release
 *   optimistic		as shared, and kept after its last release, at most quota of them and at
 *			most residency_ms; the least recently used are evicted first
 *   rtc		as optimistic, but the lifetime counts from the *first* release: time is
 *			divided into cycles of ttl_ms, and a mapping first released in one cycle is
 *			removed after the next `cycles` have passed. One in use then can no longer
 *			be found and is removed at its release.
 *
 * A mapping is reused only by its endpoint, for the same pages and with the same permissions.
 *
 * What a stale mapping leaves open: until its removal the device can still access pages that the
 * driver has taken back, with the permissions that it had.
 */
#include "exitless-iommu.h"

/* Mappings that one turn of the expiry takes out of the tables before it sends UNMAPs. */
#define EXI_EXPIRE_BATCH 256

static bool policy_keeps(enum exi_reuse policy)
{
	return policy == EXI_REUSE_OPTIMISTIC || policy == EXI_REUSE_RTC;
}

/*
 * Optimistic: the worker comes every `period` and removes what would grow too old before it comes
 * again, so that the age stays below residency_ms unless the worker is delayed by a period.
 */
static unsigned long residency_period(void)
{
	unsigned long residency = msecs_to_jiffies(max(READ_ONCE(exi_residency_ms), 1U));

	return clamp(residency / 8, 1UL, (unsigned long)HZ);
}

static bool residency_over(const struct exi_map *map)
{
	unsigned long residency = msecs_to_jiffies(max(READ_ONCE(exi_residency_ms), 1U));
	unsigned long period = residency_period();

	return time_after_eq(jiffies,
			     map->released + (residency > period ? residency - period : 0));
}

static unsigned long cycle_length(void)
{
	return max(msecs_to_jiffies(READ_ONCE(exi_ttl_ms)), 1UL);
}

/* Starts as many cycles as time has passed. Called with ep->lock held. */
static void advance_cycles(struct exi_ep *ep)
{
	unsigned long length = cycle_length(), passed = (jiffies - ep->cycle_start) / length;

	ep->cycle_now += passed;
	ep->cycle_start += passed * length;
}

static void arm_expiry(struct exi_iommu *iommu, enum exi_reuse policy)
{
	unsigned long delay = residency_period();

	if (policy == EXI_REUSE_RTC)
		delay = clamp(cycle_length() / 8, 1UL, (unsigned long)HZ);
	if (!READ_ONCE(iommu->closing))
		queue_delayed_work(iommu->wq, &iommu->work, delay);
}

/* May this mapping serve another map call? Called with ep->lock held. */
bool exi_may_match(const struct exi_map *map, enum exi_reuse policy)
{
	return (map->users || policy_keeps(policy)) && !map->expired;
}

/* A stale mapping is used again. Called with ep->lock held. */
void exi_match(struct exi_ep *ep, struct exi_map *map)
{
	u64 age;

	if (!map->stale)
		return;
	age = jiffies_to_msecs(jiffies - map->released);
	ep->st.stale_age_max_ms = max(ep->st.stale_age_max_ms, age);
	map->stale = false;
	list_del_init(&map->link);
	ep->nstale--;
	ep->st.stale--;
	atomic_long_dec(&ep->iommu->stale);
}

/* The last user of a mapping has gone: keep it or put it on dead. Called with ep->lock held. */
void exi_release(struct exi_ep *ep, struct exi_map *map, bool keep, struct list_head *dead)
{
	enum exi_reuse policy = exi_policy();
	u32 quota = READ_ONCE(exi_quota);
	unsigned int n = 0;

	map->released = jiffies;
	if (!keep || !policy_keeps(policy) || map->expired || hlist_unhashed(&map->by_key)) {
		exi_unlink(ep, map, dead);
		return;
	}
	if (policy == EXI_REUSE_RTC && list_empty(&map->cycle)) {
		advance_cycles(ep);
		map->cycle_no = ep->cycle_now;
		list_add_tail(&map->cycle, &ep->fifo);
	}
	map->stale = true;
	list_add_tail(&map->link, &ep->stale);
	ep->nstale++;
	ep->st.stale++;
	ep->st.stale_max = max(ep->st.stale_max, ep->st.stale);
	exi_count_up(&ep->iommu->stale, &ep->iommu->stale_max);
	if (!delayed_work_pending(&ep->iommu->work))
		arm_expiry(ep->iommu, policy);

	if (ep->nstale <= quota)
		return;
	while (ep->nstale && n++ < EXI_EVICT_BATCH) {
		map = list_first_entry(&ep->stale, struct exi_map, link);
		exi_unlink(ep, map, dead);
		ep->st.evictions++;
		/* A batch at once, so that one notification serves many, but not below 7/8. */
		if (ep->nstale <= quota - quota / 8)
			break;
	}
}

/* Takes the next expired mapping out of the tables. Called with ep->lock held. */
static bool expire_one(struct exi_ep *ep, enum exi_reuse policy, struct list_head *dead)
{
	struct exi_map *map;

	map = list_first_entry_or_null(&ep->stale, struct exi_map, link);
	if (ep->nstale > READ_ONCE(exi_quota)) {	/* the quota was lowered */
		exi_unlink(ep, map, dead);
		return true;
	}
	if (policy == EXI_REUSE_RTC) {
		while (!list_empty(&ep->fifo)) {
			map = list_first_entry(&ep->fifo, struct exi_map, cycle);
			if (ep->cycle_now - map->cycle_no <= READ_ONCE(exi_cycles))
				return false;
			if (map->stale) {
				exi_unlink(ep, map, dead);
				return true;
			}
			list_del_init(&map->cycle);
			hash_del(&map->by_key);
			map->expired = true;
		}
		return false;
	}
	if (!map || (policy == EXI_REUSE_OPTIMISTIC && !residency_over(map)))
		return false;
	exi_unlink(ep, map, dead);
	return true;
}

/* Removes what has expired under the policy. Returns whether anything is left to expire. */
static bool expire(struct exi_ep *ep, enum exi_reuse policy)
{
	struct exi_map *map, *next;
	unsigned long flags;
	LIST_HEAD(dead);
	unsigned int n;
	bool left;

	do {
		spin_lock_irqsave(&ep->lock, flags);
		if (policy == EXI_REUSE_RTC)
			advance_cycles(ep);
		else	/* the policy was changed: no lifetime counts from a first release */
			list_for_each_entry_safe(map, next, &ep->fifo, cycle)
				list_del_init(&map->cycle);
		for (n = 0; n < EXI_EXPIRE_BATCH && expire_one(ep, policy, &dead); n++)
			ep->st.expiries++;
		left = ep->nstale || !list_empty(&ep->fifo);
		spin_unlock_irqrestore(&ep->lock, flags);
		exi_unmap_list(ep, &dead, false);
		cond_resched();
	} while (n == EXI_EXPIRE_BATCH);
	return left;
}

/* Removes all stale mappings that there are now. Called without locks, in process context. */
void exi_drop_stale(struct exi_ep *ep)
{
	unsigned long flags;
	LIST_HEAD(dead);
	unsigned int n;
	u32 left;

	spin_lock_irqsave(&ep->lock, flags);
	left = ep->nstale;
	spin_unlock_irqrestore(&ep->lock, flags);
	do {
		spin_lock_irqsave(&ep->lock, flags);
		for (n = 0; n < EXI_EXPIRE_BATCH && left && ep->nstale; n++, left--) {
			exi_unlink(ep, list_first_entry(&ep->stale, struct exi_map, link), &dead);
			ep->st.flushes++;
		}
		spin_unlock_irqrestore(&ep->lock, flags);
		exi_unmap_list(ep, &dead, false);
		cond_resched();
	} while (n == EXI_EXPIRE_BATCH);
}

/* Expiry; deferred UNMAPs and the watch over a suspect device; endpoints that were removed. */
void exi_work_fn(struct work_struct *work)
{
	struct exi_iommu *iommu = container_of(work, struct exi_iommu, work.work);
	enum exi_reuse policy = exi_policy();
	bool watch = exi_watch_suspect(iommu), left = false;
	struct exi_ep *ep;

	mutex_lock(&iommu->mutex);
	list_for_each_entry(ep, &iommu->eps, link)
		left |= expire(ep, policy);
	exi_retire_removed(iommu);
	mutex_unlock(&iommu->mutex);
	if (READ_ONCE(iommu->closing))
		return;
	if (watch)
		mod_delayed_work(iommu->wq, &iommu->work, msecs_to_jiffies(10));
	else if (left)
		arm_expiry(iommu, policy);
}

/* A parameter changed: what the worker had planned may be too late. Process context. */
void exi_rearm(void)
{
	struct exi_iommu *iommu;

	mutex_lock(&exi_instances_lock);
	list_for_each_entry(iommu, &exi_instances, instance)
		if (!READ_ONCE(iommu->closing))
			mod_delayed_work(iommu->wq, &iommu->work, 0);
	mutex_unlock(&exi_instances_lock);
}
