/* Makes srun take HyperPod's --auto-resume and pyxis's --container-* options, and shows tasks what came in. */
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>

SPANK_PLUGIN(lt_stub, 1);

static const char *names[] = {"auto-resume", "container-image", "container-mounts", "container-workdir"};
static char values[4][4096];

static int keep(int which, const char *value, int remote) {
    (void)remote;
    snprintf(values[which], sizeof values[which], "%s", value ? value : "");
    return ESPANK_SUCCESS;
}

static struct spank_option options[] = {
    {"auto-resume", "N", "stub of SageMaker HyperPod's option", 1, 0, keep},
    {"container-image", "IMAGE", "stub of pyxis's option", 1, 1, keep},
    {"container-mounts", "MOUNTS", "stub of pyxis's option", 1, 2, keep},
    {"container-workdir", "FOLDER", "stub of pyxis's option", 1, 3, keep},
};

int slurm_spank_init(spank_t sp, int ac, char **av) {
    (void)ac;
    (void)av;
    for (int i = 0; i < 4; i++)
        if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS) return ESPANK_ERROR;
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av) {
    (void)ac;
    (void)av;
    for (int i = 0; i < 4; i++) {
        char name[64] = "STUB_";
        for (size_t j = 0; j < strlen(names[i]); j++)
            name[5 + j] = names[i][j] == '-' ? '_' : (char)(names[i][j] - 32), name[6 + j] = 0;
        if (values[i][0]) spank_setenv(sp, name, values[i], 1);
    }
    return ESPANK_SUCCESS;
}
