// SPDX-License-Identifier: GPL-2.0
/*
 * Guest program of the module's tests. Static: gcc -O2 -static -o io io.c
 *
 *   io verify DEV N SPAN_MIB	  N direct writes of 4 to 128 KiB at random, then every block written
 *				  is read back and compared; twice
 *   io read DEV WARM N BUFS BYTES
 *				  WARM direct reads, then N counted ones, cycling through BUFS
 *				  buffers; prints the module's counters over the N reads
 *   io gap DEV SECONDS		  reads for that long; prints reads and the longest pause in ms
 *   io cpu SECONDS		  computes for that long; prints the share of the CPU it got
 *   io edu SYSFS_DIR ADDRESS	  lets QEMU's edu device read 4 bytes from ADDRESS
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define STATS "/sys/kernel/debug/exitless-iommu/stats"
#define BLOCK 4096
#define MAX_BLOCKS 32

static uint64_t rng = 0x9E3779B97F4A7C15ull;

static uint64_t next_random(void)
{
	rng ^= rng >> 12;
	rng ^= rng << 25;
	rng ^= rng >> 27;
	return rng * 0x2545F4914F6CDD1Dull;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec + ts.tv_nsec / 1e9;
}

static char *buffer(size_t bytes)
{
	char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (p == MAP_FAILED)
		die("mmap");
	memset(p, 1, bytes);
	return p;
}

static int open_direct(const char *dev, uint64_t *size)
{
	int fd = open(dev, O_RDWR | O_DIRECT);

	if (fd < 0)
		die(dev);
	*size = lseek(fd, 0, SEEK_END);
	return fd;
}

static uint64_t counter(const char *stats, const char *name)
{
	size_t n = strlen(name);

	for (const char *line = stats; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (!strncmp(line, name, n) && line[n] == ' ')
			return strtoull(line + n, NULL, 10);
	}
	return 0;
}

static void read_stats(char *buf, size_t size)
{
	int fd = open(STATS, O_RDONLY);
	ssize_t n = 0, got;

	while (fd >= 0 && (got = read(fd, buf + n, size - 1 - n)) > 0)
		n += got;
	buf[n] = 0;
	if (fd >= 0)
		close(fd);
}

static void fill(uint64_t *words, uint64_t block, uint32_t generation)
{
	for (int i = 0; i < BLOCK / 8; i++)
		words[i] = (block * 1000003 + generation) * 0x9E3779B97F4A7C15ull + i;
}

static int verify(const char *dev, uint64_t n, uint64_t span_mib)
{
	uint64_t size, blocks, want[BLOCK / 8], checked = 0, bad = 0;
	int fd = open_direct(dev, &size);
	char *buf = buffer(MAX_BLOCKS * BLOCK);
	uint32_t *generation;

	blocks = span_mib * (1 << 20) / BLOCK;
	if (blocks * BLOCK > size)
		blocks = size / BLOCK / MAX_BLOCKS * MAX_BLOCKS;
	generation = calloc(blocks, sizeof(*generation));
	rng ^= getpid();
	for (int round = 0; round < 2; round++) {
		for (uint64_t i = 0; i < n; i++) {
			uint64_t k = 1 + next_random() % MAX_BLOCKS;
			uint64_t at = next_random() % (blocks - k + 1);

			for (uint64_t j = 0; j < k; j++)
				fill((void *)(buf + j * BLOCK), at + j, ++generation[at + j]);
			if (pwrite(fd, buf, k * BLOCK, at * BLOCK) != (ssize_t)(k * BLOCK))
				die("write");
		}
		if (fsync(fd))
			die("fsync");
		for (uint64_t at = 0; at < blocks; at += MAX_BLOCKS) {
			memset(buf, 0xa5, MAX_BLOCKS * BLOCK);
			if (pread(fd, buf, MAX_BLOCKS * BLOCK, at * BLOCK) != MAX_BLOCKS * BLOCK)
				die("read");
			for (int j = 0; j < MAX_BLOCKS; j++) {
				if (!generation[at + j])
					continue;
				fill(want, at + j, generation[at + j]);
				checked++;
				bad += !!memcmp(want, buf + j * BLOCK, BLOCK);
			}
		}
	}
	printf("verified %lu blocks, %lu bad\n", checked, bad);
	return bad || !checked;
}

static void read_many(int fd, uint64_t size, uint64_t n, char *buf, uint64_t bufs, uint64_t bytes)
{
	for (uint64_t i = 0; i < n; i++)
		if (pread(fd, buf + i % bufs * bytes, bytes,
			  next_random() % (size / bytes) * bytes) != (ssize_t)bytes)
			die("read");
}

static int count_reads(const char *dev, uint64_t warm, uint64_t n, uint64_t bufs, uint64_t bytes)
{
	static const char * const names[] = { "maps", "hits", "shared", "req_map", "req_unmap",
					      "kicks", "evictions", "expiries", "stale" };
	static char before[65536], after[65536];
	uint64_t size;
	int fd = open_direct(dev, &size);
	char *buf = buffer(bufs * bytes);

	read_many(fd, size, warm, buf, bufs, bytes);
	read_stats(before, sizeof(before));
	read_many(fd, size, n, buf, bufs, bytes);
	read_stats(after, sizeof(after));
	printf("reads %lu", n);
	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		printf(" %s %ld", names[i],
		       (long)(counter(after, names[i]) - counter(before, names[i])));
	printf("\n");
	return 0;
}

static int longest_gap(const char *dev, double seconds)
{
	double start = now(), last = start, t = start, gap = 0;
	uint64_t size, n = 0;
	int fd = open_direct(dev, &size);
	char *buf = buffer(8 * BLOCK);

	for (; t - start < seconds; n++) {
		if (pread(fd, buf + n % 8 * BLOCK, BLOCK,
			  next_random() % (size / BLOCK) * BLOCK) != BLOCK)
			die("read");
		t = now();
		if (t - last > gap)
			gap = t - last;
		last = t;
	}
	printf("%lu reads, longest pause %.0f ms\n", n, gap * 1000);
	return 0;
}

static int cpu_share(double seconds)
{
	double start = now(), used;
	volatile uint64_t work = 0;
	struct rusage usage;

	while (now() - start < seconds)
		for (int i = 0; i < 100000; i++)
			work++;
	getrusage(RUSAGE_SELF, &usage);
	used = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
	       (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
	printf("%.0f\n", 100 * used / (now() - start));
	return 0;
}

/* QEMU, docs/specs/edu: source, destination, count and command of its DMA engine. */
static int edu_read(const char *dir, uint64_t address)
{
	volatile uint64_t *regs;
	uint16_t command = 0x6;		/* PCI: memory space, bus master */
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "%s/config", dir);
	fd = open(path, O_RDWR);
	if (fd < 0 || pwrite(fd, &command, sizeof(command), 4) != sizeof(command))
		die(path);
	close(fd);
	snprintf(path, sizeof(path), "%s/resource0", dir);
	fd = open(path, O_RDWR);
	if (fd < 0)
		die(path);
	regs = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (regs == MAP_FAILED)
		die("mmap");
	regs[0x80 / 8] = address;
	regs[0x88 / 8] = 0x40000;
	regs[0x90 / 8] = 4;
	regs[0x98 / 8] = 1;
	for (double start = now(); regs[0x98 / 8] & 1;)
		if (now() - start > 10)
			return 1;
	return 0;
}

int main(int c, char **v)
{
	if (c == 5 && !strcmp(v[1], "verify"))
		return verify(v[2], strtoull(v[3], NULL, 0), strtoull(v[4], NULL, 0));
	if (c == 7 && !strcmp(v[1], "read"))
		return count_reads(v[2], strtoull(v[3], NULL, 0), strtoull(v[4], NULL, 0),
				   strtoull(v[5], NULL, 0), strtoull(v[6], NULL, 0));
	if (c == 4 && !strcmp(v[1], "gap"))
		return longest_gap(v[2], atof(v[3]));
	if (c == 3 && !strcmp(v[1], "cpu"))
		return cpu_share(atof(v[2]));
	if (c == 4 && !strcmp(v[1], "edu"))
		return edu_read(v[2], strtoull(v[3], NULL, 0));
	fprintf(stderr, "usage: see the head of io.c\n");
	return 2;
}
