/* Kills, tears or refuses the k-th change of a file below a folder, in whatever language it is made.
 *
 *     cc -shared -fPIC -o torn_writes.so torn_writes.c -ldl
 *     LD_PRELOAD=./torn_writes.so python ...
 *
 * Preloaded it does nothing until `arm` is called. It sees every write, rename, removal and sync that
 * goes through the C library: Python's own and those of Orbax's storage, which is C++.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, TEAR, REFUSE };

static char below[PATH_MAX];
static size_t below_length;
static long at, seen;
static int fault = OFF;

/* Changes below `folder` are counted from here on; the k-th meets the fault. */
void arm(const char *folder, long k, int kind) {
  snprintf(below, sizeof below, "%s", folder);
  below_length = strlen(below);
  at = k;
  seen = 0;
  fault = kind;
}

/* How many changes there were since `arm`. */
long changes(void) { return seen; }

static int is_below(const char *path) { return path && !strncmp(path, below, below_length); }

static int is_open_below(int number) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", number);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

/* Whether this change is the one. A kill happens here, before it; a refusal sets errno. */
static int is_due(int concerned) {
  if (!concerned || __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST) != at || fault == COUNT) return 0;
  if (fault == KILL) kill(getpid(), SIGKILL);
  errno = ENOSPC;
  return 1;
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int number, const void *bytes, size_t length) {
  NEXT(write);
  if (fault != OFF && is_due(is_open_below(number))) {
    if (fault == REFUSE) return -1;
    next(number, bytes, length / 2);
    kill(getpid(), SIGKILL);
  }
  return next(number, bytes, length);
}

ssize_t writev(int number, const struct iovec *parts, int count) {
  NEXT(writev);
  if (fault != OFF && is_due(is_open_below(number))) {
    if (fault == REFUSE) return -1;
    next(number, parts, count / 2);
    kill(getpid(), SIGKILL);
  }
  return next(number, parts, count);
}

/* What has no half: a tear is a kill before it. */
#define WHOLE(concerned, call)                        \
  if (fault != OFF && is_due(concerned)) {            \
    if (fault == REFUSE) return -1;                   \
    kill(getpid(), SIGKILL);                          \
  }                                                   \
  return call;

int rename(const char *from, const char *to) {
  NEXT(rename);
  WHOLE(is_below(to), next(from, to))
}

int unlink(const char *path) {
  NEXT(unlink);
  WHOLE(is_below(path), next(path))
}

int unlinkat(int folder, const char *path, int flags) {
  NEXT(unlinkat);
  WHOLE(*path == '/' ? is_below(path) : is_open_below(folder), next(folder, path, flags))
}

int rmdir(const char *path) {
  NEXT(rmdir);
  WHOLE(is_below(path), next(path))
}

int mkdir(const char *path, mode_t mode) {
  NEXT(mkdir);
  WHOLE(is_below(path), next(path, mode))
}

int fsync(int number) {
  NEXT(fsync);
  WHOLE(is_open_below(number), next(number))
}
