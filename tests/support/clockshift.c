/* Preloaded below a process: its wall clock is ahead by the seconds that a file of eight bytes holds at that moment.

   Monotonic clocks stay as they are. Absolute times of waits are turned back, so that a wait lasts as long as it was
   meant to last when it began. Times of monotonic clocks, which are small, are left alone.
   (libfaketime 0.9.10 does this too, but makes every time.sleep of Python 3.11 fail.) */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;
static int (*next_clock)(clockid_t, struct timespec *);
static long (*next_syscall)(long, ...);
static int (*next_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*next_semaphore)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CLOCKSHIFT_FILE");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *mapped = file >= 0 ? mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  if (file >= 0) close(file);
  if (mapped == MAP_FAILED) abort();
  next_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  next_semaphore = dlsym(RTLD_NEXT, "sem_timedwait");
  ahead = mapped;
}

static int64_t shift(void) { return ahead ? *ahead : 0; }

static const struct timespec *right(const struct timespec *time, struct timespec *space) {
  if (!time || time->tv_sec < 1000000000) return time;
  *space = *time;
  space->tv_sec -= shift();
  return space;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (!next_clock) next_clock = dlsym(RTLD_NEXT, "clock_gettime"); /* other libraries begin before this one */
  int result = next_clock(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += shift();
  return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *place) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (place) *place = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *time) {
  struct timespec space;
  return next_cond(cond, mutex, right(time, &space));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *time) {
  struct timespec space;
  return next_semaphore(semaphore, right(time, &space));
}

/* Abseil, and so gRPC, waits by futexes of its own. */
long syscall(long number, ...) {
  struct timespec space;
  va_list given;
  long words[6];
  if (!next_syscall) next_syscall = dlsym(RTLD_NEXT, "syscall");
  va_start(given, number);
  for (int each = 0; each < 6; each++) words[each] = va_arg(given, long);
  va_end(given);
  if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME))
    words[3] = (long)right((const struct timespec *)words[3], &space);
  return next_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
