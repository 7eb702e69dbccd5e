/* The first program of a test guest: loads the modules in order, waits for the disk and says what it sees. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "/modules/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    long done = fd < 0 ? -1 : syscall(SYS_finit_module, fd, "", 0);
    printf("MODULE %s %s\n", name, done == 0 ? "ok" : strerror(errno));
    if (fd >= 0)
        close(fd);
}

int main(void)
{
    struct timespec { long s, ns; } now;
    syscall(SYS_clock_gettime, 1, &now);
    printf("INIT at %ld.%03ld\n", now.s, now.ns / 1000000);
    mount("dev", "/dev", "devtmpfs", 0, "");
    char line[200];
    FILE *list = fopen("/modules/list", "re");
    while (list && fgets(line, sizeof line, list)) {
        line[strcspn(line, " \n")] = 0; /* reasons to load it follow */
        load(line);
    }
    struct stat disk;
    for (int i = 0; i < 100 && stat("/dev/vda", &disk); i++)
        usleep(50000);
    printf("VDA %s\n", stat("/dev/vda", &disk) ? "missing" : "there");
    printf("MOUNT %s\n", mount("/dev/vda", "/newroot", "ext4", 0, "") ? strerror(errno) : "ok");
    unsigned long long blocks = 5ull << 30 >> 12; /* 5 GiB in blocks of 4 KiB */
    int root = open("/newroot", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    printf("GROW %s\n", syscall(SYS_ioctl, root, 0x40086610ul, &blocks) ? strerror(errno) : "ok");
    FILE *file = fopen("/newroot/etc/marker", "re");
    printf("MARKER %s\n", file && fgets(line, sizeof line, file) ? line : "missing");
    syscall(SYS_clock_gettime, 1, &now);
    printf("END at %ld.%03ld\n", now.s, now.ns / 1000000);
    fflush(stdout);
    sync();
    reboot(RB_AUTOBOOT);
    return 0;
}
