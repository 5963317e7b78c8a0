/* Keeps a pod's namespaces: sleeps, collects children whose parents are gone, ends when asked to. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void collect(int number) {
  (void)number;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

static void leave(int number) {
  (void)number;
  _exit(0);
}

int main(void) {
  struct sigaction on_child = {.sa_handler = collect, .sa_flags = SA_NOCLDSTOP};
  struct sigaction on_end = {.sa_handler = leave};
  sigaction(SIGCHLD, &on_child, NULL);
  sigaction(SIGINT, &on_end, NULL);
  sigaction(SIGTERM, &on_end, NULL);
  for (;;) {
    pause();
  }
}
