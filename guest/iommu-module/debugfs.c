// SPDX-License-Identifier: GPL-2.0
/*
 * Counters: debugfs exitless-iommu/stats, one "name value" per line, and exitless-iommu/flush.
 *
 * Sums over all endpoints come first, then each endpoint's own as "<PCI address> name value".
 * README.md lists the names. With several devices each is introduced by "device <PCI address>".
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "exitless-iommu.h"

static struct dentry *exi_dir;

/* Adds counters; of maxima, the larger. */
void exi_stats_sum(struct exi_ep_stats *sum, const struct exi_ep_stats *st)
{
#define ADD(name) (sum->name += st->name)
#define MAXIMUM(name) (sum->name = max(sum->name, st->name))
	ADD(maps); ADD(unmaps); ADD(hits); ADD(shared); ADD(misses);
	ADD(map_failures); ADD(unknown_unmaps); ADD(evictions); ADD(expiries); ADD(flushes);
	ADD(live); ADD(stale); ADD(req_map); ADD(req_unmap); ADD(removed);
	MAXIMUM(live_max); MAXIMUM(stale_max); MAXIMUM(stale_age_max_ms);
#undef ADD
#undef MAXIMUM
}

static void show_ep_stats(struct seq_file *s, const char *prefix, const struct exi_ep_stats *st)
{
#define SHOW(name) seq_printf(s, "%s%s %llu\n", prefix, #name, st->name)
	SHOW(maps); SHOW(unmaps); SHOW(hits); SHOW(shared); SHOW(misses);
	SHOW(map_failures); SHOW(unknown_unmaps); SHOW(req_map); SHOW(req_unmap); SHOW(removed);
	SHOW(evictions); SHOW(expiries); SHOW(flushes);
	SHOW(live); SHOW(live_max); SHOW(stale); SHOW(stale_max); SHOW(stale_age_max_ms);
#undef SHOW
}

static void show_iommu(struct seq_file *s, struct exi_iommu *iommu)
{
	struct exi_ep_stats sum;
	struct exi_ep *ep;
	char prefix[32];

	mutex_lock(&iommu->mutex);
	sum = iommu->retired;
	list_for_each_entry(ep, &iommu->eps, link)
		exi_stats_sum(&sum, &ep->st);
	sum.live_max = atomic_long_read(&iommu->live_max);
	sum.stale_max = atomic_long_read(&iommu->stale_max);
	seq_printf(s, "policy %s\n", exi_policy_name(exi_policy()));
	show_ep_stats(s, "", &sum);
#define SHOW(name) seq_printf(s, "%s %llu\n", #name, iommu->st.name)
	SHOW(req_attach); SHOW(req_detach); SHOW(req_probe); SHOW(kicks);
	SHOW(spin_max_us); SHOW(errors); SHOW(timeouts); SHOW(suspect_calls);
	SHOW(quarantined); SHOW(quarantined_total); SHOW(late); SHOW(resumed); SHOW(lost);
	SHOW(faults);
#undef SHOW
	seq_printf(s, "suspect %u\nbroken %u\nmap_bytes %zu\n", iommu->suspect, iommu->broken,
		   sizeof(struct exi_map));
	list_for_each_entry(ep, &iommu->eps, link) {
		snprintf(prefix, sizeof(prefix), "%s ", dev_name(ep->dev));
		show_ep_stats(s, prefix, &ep->st);
	}
	mutex_unlock(&iommu->mutex);
}

static int stats_show(struct seq_file *s, void *unused)
{
	struct exi_iommu *iommu;

	mutex_lock(&exi_instances_lock);
	list_for_each_entry(iommu, &exi_instances, instance) {
		if (!list_is_singular(&exi_instances))
			seq_printf(s, "device %s\n", pci_name(iommu->pdev));
		show_iommu(s, iommu);
	}
	mutex_unlock(&exi_instances_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

/* Whatever is written: removes all stale mappings. */
static ssize_t flush_write(struct file *file, const char __user *buf, size_t count, loff_t *pos)
{
	struct exi_iommu *iommu;
	struct exi_ep *ep;

	mutex_lock(&exi_instances_lock);
	list_for_each_entry(iommu, &exi_instances, instance) {
		mutex_lock(&iommu->mutex);
		list_for_each_entry(ep, &iommu->eps, link)
			exi_drop_stale(ep);
		mutex_unlock(&iommu->mutex);
	}
	mutex_unlock(&exi_instances_lock);
	return count;
}

static const struct file_operations flush_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = flush_write,
};

void exi_debugfs_init(void)
{
	exi_dir = debugfs_create_dir("exitless-iommu", NULL);
	debugfs_create_file("stats", 0400, exi_dir, NULL, &stats_fops);
	debugfs_create_file("flush", 0200, exi_dir, NULL, &flush_fops);
}

void exi_debugfs_exit(void)
{
	debugfs_remove_recursive(exi_dir);
}
