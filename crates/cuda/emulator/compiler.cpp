// Plays NVRTC: "compiles" a kernel into a shared library for this machine's processor, with the system's C++ compiler.
//
// An image is a length and the library's bytes, so that images can be cached like real ones.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "temporary.hpp"

struct Program {
  std::string source, image, log;
};

static std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Inline PTX becomes calls of the prelude's functions; every kernel gets an entry that takes its params by address.
static std::string translate(const std::string& source) {
  std::string text = std::regex_replace(
      source, std::regex("asm\\(\"cvt\\.f32\\.f16[^;]*;\"[^;]*;"), "value = emulated_half_to_float(bits);");
  text = std::regex_replace(text, std::regex("asm\\(\"cvt\\.rn\\.f16\\.f32[^;]*;\"[^;]*;"),
                            "bits = emulated_float_to_half(value);");
  // The file of instructions has a twin here.
  const std::string ptx = "#line 1 \"kernels/lib/ptx.cuh\"";
  if (const size_t start = text.find(ptx); start != std::string::npos) {
    // Its own include of the numbers comes first in any case; what follows the next mark belongs to whoever included it.
    const size_t body = text.find("#define DYNAMIC_SHARED", start);
    const size_t end = text.find("#line", body);
    text.replace(body, end - body, "#include \"ptx.hpp\"\n");
  }
  std::regex kernel("__global__ void (?:__(?:launch_bounds|maxnreg)__\\([^)]*\\) )?(\\w+)\\(const (\\w+) p\\)");
  std::ostringstream entries;
  for (std::sregex_iterator i(text.begin(), text.end(), kernel), end; i != end; ++i)
    entries << "extern \"C\" void emulated_" << (*i)[1] << "(const void* params) { " << (*i)[1] << "(*(const "
            << (*i)[2] << "*)params); }\n"
            << "extern \"C\" unsigned long emulated_bytes_" << (*i)[1] << "() { return sizeof(" << (*i)[2] << "); }\n";
  return "#include \"prelude.hpp\"\n" + text + entries.str();
}

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 0;  // no real one: cached images of real ones are not taken for ours
  *minor = 2;  // counts changes of what an image holds
  return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}

int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80, archs[1] = 89, archs[2] = 90;
  return 0;
}

const char* nvrtcGetErrorString(int status) { return status == 0 ? "success" : "the C++ compiler refused"; }

int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
  *program = new Program{source, "", ""};
  return 0;
}

int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::string base = temporary("emulated-kernel");
  if (!mkdtemp(base.data())) return 1;
  std::ofstream(base + "/kernel.cpp") << translate(program->source);
  std::ostringstream command;
  command << "g++ -std=c++17 -O2 -march=native -ffp-contract=off -fno-strict-aliasing -w -shared -fPIC -I" << EMULATOR_DIR;
  for (int i = 0; i < count; i++)
    if (std::string(options[i]).rfind("-D", 0) == 0) command << ' ' << options[i];
  command << ' ' << base << "/kernel.cpp -o " << base << "/kernel.so 2> " << base << "/log";
  const int status = std::system(command.str().c_str());
  program->log = read_file(base + "/log");
  if (status == 0) {
    std::string library = read_file(base + "/kernel.so");
    const uint64_t length = library.size();
    program->image = std::string((const char*)&length, sizeof length) + library;
  }
  std::system(("rm -r " + base).c_str());
  return status == 0 ? 0 : 6;
}

int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = program->image.size();
  return 0;
}

int nvrtcGetCUBIN(Program* program, char* image) {
  program->image.copy(image, program->image.size());
  return 0;
}

int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(Program* program, char* log) {
  program->log.copy(log, program->log.size());
  log[program->log.size()] = 0;
  return 0;
}
}
